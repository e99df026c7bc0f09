"""Which DeepSpeed is accepted, and where its words go; without importing it."""

import logging
from importlib import metadata

import pytest

from megatron.config.deepspeed.version import version_problem
from megatron.engine.deepspeed import start
from megatron.errors import MachineError
from megatron.mpu.context import ParallelContext
from tests.support.output import without_times


def versions(monkeypatch: pytest.MonkeyPatch, found: str | None) -> None:
    def version(name: str) -> str:
        assert name == "deepspeed"
        if found is None:
            raise metadata.PackageNotFoundError(name)
        return found

    monkeypatch.setattr(metadata, "version", version)


@pytest.mark.parametrize("found", ["0.19.0", "0.19.8", "0.19.12+cu130"])
def test_tested_versions_are_accepted(monkeypatch: pytest.MonkeyPatch, found: str) -> None:
    versions(monkeypatch, found)
    assert version_problem() is None


@pytest.mark.parametrize(
    ("found", "words"), [("0.9.5", "too old"), ("0.18.9", "too old"), ("0.20.0", "too new")]
)
def test_other_versions_are_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, found: str, words: str
) -> None:
    versions(monkeypatch, found)
    with pytest.raises(MachineError, match=f"this DeepSpeed is {words}") as error:
        start.import_deepspeed()
    assert f"deepspeed {found}; tested with 0.19.x" in str(error.value)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    versions(monkeypatch, None)
    with pytest.raises(MachineError, match="but DeepSpeed is not installed") as error:
        start.import_deepspeed()
    assert "'deepspeed==0.19.*'" in error.value.fix


class _FakeAccelerator:
    def __init__(self, name: str) -> None:
        self.name = name

    def device_name(self) -> str:
        return self.name


class _FakeDeepSpeed:
    def __init__(self, device: str) -> None:
        self.device = device

    def get_accelerator(self) -> _FakeAccelerator:
        return _FakeAccelerator(self.device)


def test_another_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(start.device, "current", lambda: torch.device("cuda", 0))
    with pytest.raises(MachineError, match="are for different devices") as error:
        start._check_accelerator(_FakeDeepSpeed("xpu"))  # type: ignore[arg-type]
    assert "DeepSpeed computes on xpu, --device cuda" in str(error.value)


def test_a_process_without_groups_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "import_deepspeed", lambda: _FakeDeepSpeed("cpu"))
    monkeypatch.setattr(start.importlib, "import_module", lambda name: logging)
    with pytest.raises(MachineError, match="DeepSpeed needs a process group"):
        start.start_deepspeed(ParallelContext.single())


def test_its_words_go_through_our_log(capsys: pytest.CaptureFixture[str]) -> None:
    logger = logging.getLogger("DeepSpeed")
    kept = logger.handlers, logger.level
    try:
        start._log_through_ours()
        logger.info("nobody wants to know")
        logger.warning("**** You are using ZeRO with an untested optimizer, proceed with caution")
        logger.warning("something odd")
        logger.error("something wrong")
    finally:
        logger.handlers, logger.level = kept
    printed = capsys.readouterr()
    assert printed.out == ""
    assert (
        without_times(printed.err)
        == "WARNING: DeepSpeed: something odd\nERROR: DeepSpeed: something wrong\n"
    )


def test_what_it_prints_is_held_back(capsys: pytest.CaptureFixture[str]) -> None:
    with start.quietly():
        print("MA 0.34 GB")
    assert capsys.readouterr().out == ""
