"""pretrain_gpt.py through DeepSpeed, as a user starts it: what it prints, and how it ends."""

import json
from pathlib import Path

import pytest

from tests.support.launch import (
    PRETRAIN,
    byte_corpus,
    pretrain_words,
    run_program,
    small_run,
    torchrun_words,
)

_FEW = ("--train-iters", "2", "--eval-iters", "0", "--deepspeed")


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> str:
    return byte_corpus(tmp_path_factory.mktemp("corpus"))


def run(words: list[str], cwd: Path, **environment: str) -> tuple[int, str, str]:
    ended = run_program(words, cwd=cwd, environment=environment, warm_children=True)
    return ended.status, ended.out, ended.err


def test_nothing_of_deepspeeds_own_noise_is_printed(prefix: str, tmp_path: Path) -> None:
    """Its prints, log lines and the warnings about names that it uses; bf16 prints most."""
    flags = small_run(prefix, *_FEW, "--bf16", "--zero-stage", "1")
    status, out, err = run(pretrain_words(*flags), tmp_path)
    assert status == 0, err
    assert "iteration        2/       2" in out
    for words in ("Max_MA", "CPU Virtual Memory", "[INFO]", "DeepSpeed info", "Removed grad acc"):
        assert words not in out + err
    assert "Warning" not in err
    assert "WARNING" not in err


def test_nothing_is_compiled_and_no_dead_compiler_is_waited_for(
    prefix: str, tmp_path: Path
) -> None:
    """DeepSpeed would compile shm_comm where it finds LOCAL_SIZE, behind a lock that stays."""
    lock = tmp_path / "extensions" / "deepspeed_shm_comm" / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    flags = small_run(prefix, *_FEW, "--zero-stage", "3")
    status, out, err = run(
        torchrun_words(2, PRETRAIN, *flags),
        tmp_path,
        CXX="/bin/false",
        TORCH_EXTENSIONS_DIR=str(tmp_path / "extensions"),
        LOCAL_SIZE="2",
    )
    assert status == 0, err
    assert "iteration        2/       2" in out
    assert [path.name for path in lock.parent.iterdir()] == ["lock"]


def test_a_compiler_that_fails_leaves_the_update_to_torch(prefix: str, tmp_path: Path) -> None:
    block = {"device": "cpu", "pin_memory": False}
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({"zero_optimization": {"stage": 2, "offload_optimizer": block}}))
    flags = small_run(prefix, *_FEW, "--deepspeed_config", str(file))
    extensions = tmp_path / "extensions"
    status, out, err = run(
        pretrain_words(*flags), tmp_path, CXX="/bin/false", TORCH_EXTENSIONS_DIR=str(extensions)
    )
    assert status == 0, err
    assert "DeepSpeed's CPUAdam cannot be used" in err
    assert "iteration        2/       2" in out
    lock = extensions / "cpu_adam" / "lock"
    lock.touch()
    status, out, err = run(
        pretrain_words(*flags), tmp_path, CXX="/bin/false", TORCH_EXTENSIONS_DIR=str(extensions)
    )
    assert status == 0, err
    assert "is left from a compiler that died; remove it" in err
