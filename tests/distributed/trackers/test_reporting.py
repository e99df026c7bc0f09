"""Two ranks train under Weights & Biases, offline: one run after a resume; the key stays put."""

import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest

from megatron.training import pretrain
from pretrain_gpt import gpt_task
from tests.support.ranks import run_on_ranks
from tests.support.tiny import tiny_run, write_tiny_corpus
from tests.unit.trackers.wandb_files import offline_runs

KEY = "f4ke" * 10


class Seen(NamedTuple):
    """Whether the key is in what one rank can see."""

    by_child: bool  # in the environment of a process that the rank starts
    in_process_list: bool


def _train_and_resume(corpus: str, folder: str) -> Seen:
    for iterations in (2, 3):
        config = tiny_run(
            corpus,
            train_iters=iterations,
            save=f"{folder}/save",
            load=f"{folder}/save",
            log_interval=1,
            log_level="info",
            tensorboard_dir=f"{folder}/tensorboard",
            wandb_project="tiny",
            wandb_save_dir=folder,
        )
        pretrain(gpt_task(), config)
    child = subprocess.run(["cat", "/proc/self/environ"], capture_output=True, check=True)
    return Seen(KEY.encode() in child.stdout, _in_process_list(KEY))


def _in_process_list(text: str) -> bool:
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if text.encode() in process.read_bytes():
                return True
        except OSError:  # it has ended
            continue
    return False


def test_a_resumed_run_is_one_run_and_its_key_stays_with_the_rank_that_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setenv("HOME", str(tmp_path))
    corpus = write_tiny_corpus(tmp_path)
    seen = run_on_ranks(2, _train_and_resume, corpus, str(tmp_path))
    first, second = offline_runs(tmp_path)
    assert first.run_id == second.run_id
    assert len(first.run_id) == 32
    steps = [
        [point["iteration"] for point in start.points if "grad-norm/grad-norm" in point]
        for start in (first, second)
    ]
    assert steps == [[1, 2], [3]]
    assert first.config["flags"]["model"]["num_layers"] == 2
    assert [rank.by_child for rank in seen] == [False, True]
    assert not any(rank.in_process_list for rank in seen)
    printed = "".join(capfd.readouterr())
    assert "iteration        3/" in printed
    assert KEY not in printed
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    folders = {path.relative_to(tmp_path).parts[0] for path in files}
    assert folders >= {"save", "tensorboard", "wandb"}
    assert [path for path in files if KEY.encode() in path.read_bytes()] == []
