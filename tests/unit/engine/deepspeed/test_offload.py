"""Who updates offloaded weights, and what cannot be offloaded."""

from pathlib import Path

import pytest
from torch.utils import cpp_extension

from megatron.config.optimizer import OptimizerConfig, OptimizerKind
from megatron.engine.deepspeed import offload
from megatron.engine.deepspeed.offload import cpu_adam_for
from megatron.mpu.context import Group

ALONE = Group((0,), 0)
ADAM = OptimizerConfig()


def test_nothing_is_compiled_for_what_is_not_offloaded_or_not_adam(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(offload, "_why_not_built", lambda: pytest.fail("it compiled"))
    assert cpu_adam_for(False, True, ADAM, ALONE) is None
    assert cpu_adam_for(True, True, OptimizerConfig(optimizer=OptimizerKind.SGD), ALONE) is None
    assert capsys.readouterr().out == ""
    assert cpu_adam_for(True, False, ADAM, ALONE) is None
    assert "updated by torch's AdamW, as asked for" in capsys.readouterr().out


def test_what_does_not_build_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(offload, "_stale_lock", lambda: None)
    monkeypatch.setattr(offload, "_why_not_built", lambda: "OSError: no compiler")
    assert cpu_adam_for(True, True, ADAM, ALONE) is None
    assert "CPUAdam cannot be used (OSError: no compiler)" in capsys.readouterr().err


def test_a_lock_of_a_dead_compiler_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cpp_extension, "_get_build_directory", lambda *args: str(tmp_path))
    monkeypatch.setattr(offload, "_why_not_built", lambda: pytest.fail("it waited"))
    (tmp_path / "lock").touch()
    assert cpu_adam_for(True, True, ADAM, ALONE) is None
    assert f"{tmp_path / 'lock'} is left from a compiler that died" in capsys.readouterr().err


def test_it_is_used_where_it_builds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Module:
        DeepSpeedCPUAdam = "the class"

    monkeypatch.setattr(offload, "_stale_lock", lambda: None)
    monkeypatch.setattr(offload, "_why_not_built", lambda: None)
    monkeypatch.setattr(offload.importlib, "import_module", lambda name: Module)
    assert cpu_adam_for(True, True, ADAM, ALONE) == "the class"
    assert "updated by DeepSpeed's CPUAdam" in capsys.readouterr().out
