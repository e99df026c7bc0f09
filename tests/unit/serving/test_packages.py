"""What the server needs is named before anything of it is imported."""

import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from megatron.errors import ConfigError
from megatron.serving import packages
from megatron.serving.packages import TESTED, check_packages

ROOT = Path(__file__).resolve().parents[3]


def test_the_packages_of_the_tests_are_accepted() -> None:
    check_packages()


def test_what_is_missing_and_what_is_too_new_are_named_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    there = {"starlette": "1.10.0", "uvicorn": "0.61.2", "msgspec": "0.22.0.post1"}

    def version(name: str) -> str:
        if name not in there:
            raise metadata.PackageNotFoundError(name)
        return there[name]

    monkeypatch.setattr(packages.metadata, "version", version)
    with pytest.raises(ConfigError, match="packages are needed") as caught:
        check_packages()
    assert (
        caught.value.found
        == "uvicorn 0.61.2 (tested: >=0.54,<0.55), no prometheus-client, no llguidance"
    )
    assert caught.value.fix == "pip install 'megatron-verified[serve]'"


def test_the_extra_installs_what_is_accepted() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for extra in ("serve", "test"):
        asked = map(Requirement, project["optional-dependencies"][extra])
        ranges = {each.name: each.specifier for each in asked if each.name in TESTED}
        assert set(ranges) == set(TESTED)
        for name, (first, before) in TESTED.items():
            assert ".".join(map(str, first)) in ranges[name]
            assert ".".join(map(str, before)) not in ranges[name]
