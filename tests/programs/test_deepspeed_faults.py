"""All errors of a run through DeepSpeed are reported together, at the start."""

import json
from pathlib import Path
from typing import Any

import pytest

from megatron.errors import ConfigError
from tests.support.launch import byte_corpus, pretrain_words, run_program, small_run


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A corpus of some documents."""
    return byte_corpus(tmp_path_factory.mktemp("corpus"))


def refused(prefix: str, folder: Path, values: dict[str, Any] | str, *words: str) -> str:
    """Return the program's output for this JSON; it ends as after any error of configuration."""
    text = values if isinstance(values, str) else json.dumps(values)
    (folder / "ds.json").write_text(text, encoding="utf-8")
    flags = small_run(prefix, "--deepspeed", "--deepspeed_config", "ds.json", *words)
    ended = run_program(pretrain_words(*flags), cwd=folder)
    assert ended.status == ConfigError.exit_code, ended.text
    assert "Traceback" not in ended.text
    return ended.text


def test_all_contradictions_are_one_report(prefix: str, tmp_path: Path) -> None:
    nvme = {"device": "nvme", "nvme_path": str(tmp_path / "gone")}
    values = {
        "gradient_clipping": 1.0,
        "train_batch_size": 77,
        "zero_optimization": {"stage": 2, "offload_optimizer": nvme},
    }
    given = ("--clip-grad", "0.5", "--zero-stage", "1", "--global-batch-size", "8")
    text = refused(prefix, tmp_path, values, *given)
    for words in (
        "--clip-grad 0.5; gradient_clipping 1.0 in ds.json",
        "--global-batch-size 8, ",
        "train_batch_size 77 in ds.json",
        "--zero-stage 1; zero_optimization.stage 2 in ds.json",
        "offloading to NVMe is not supported",
    ):
        assert words in text, text


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"zero_optimization": {"stage": 1,}}', "is not JSON"),
        ('{"gradient_cliping": 1.0}', "did you mean gradient_clipping?"),
    ],
)
def test_a_file_that_cannot_be_used_is_said_once_with_all_else(
    prefix: str, tmp_path: Path, text: str, words: str
) -> None:
    message = refused(prefix, tmp_path, text, "--hidden-dropout", "0.1", "--overlap-grad-reduce")
    assert message.count(words) == 1
    assert "--overlap-grad-reduce with --deepspeed" in message
