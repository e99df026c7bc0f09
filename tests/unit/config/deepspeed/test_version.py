"""DeepSpeed is installed in a tested version, or the error names the problem."""

from importlib import metadata

import pytest

from megatron.config.deepspeed.version import version_problem


def _missing(name: str) -> str:
    raise metadata.PackageNotFoundError(name)


def test_a_missing_package_is_said_with_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", _missing)
    problem = version_problem()
    assert problem is not None
    assert problem.problem == "--deepspeed was given, but DeepSpeed is not installed"
    assert "pip install --no-build-isolation 'deepspeed==0.19.*'" in problem.fix


@pytest.mark.parametrize(
    ("version", "word"),
    [
        ("0.18.9", "old"),
        ("0.9.5", "old"),
        ("0.20.0", "new"),
        ("1.0.0", "new"),
        ("0.20.0rc1+cu130", "new"),
    ],
)
def test_a_version_that_nobody_tested_is_refused(
    monkeypatch: pytest.MonkeyPatch, version: str, word: str
) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: version)
    problem = version_problem()
    assert problem is not None
    assert problem.problem == f"this DeepSpeed is too {word}"
    assert problem.found == f"deepspeed {version}; tested with 0.19.x"


@pytest.mark.parametrize("version", ["0.19.0", "0.19.8", "0.19.12+g1234"])
def test_every_tested_version_passes(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: version)
    assert version_problem() is None
