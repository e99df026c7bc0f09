"""`make pretrain` on a text of one's own: interrupted, resumed, done, and then done already."""

import os
import signal
import sys
from pathlib import Path

import pytest

from megatron.checkpoint.folder.run_folder import TRACKER
from megatron.errors import ConfigError, DataError
from tests.support.launch import ROOT, Started, run_program, unfinished, write_text
from tools.first_run import CHECKPOINTS, Places, main, refuse_changed_text, training_command

ITERATIONS = 60
FIRST_CHECKPOINT = ITERATIONS // CHECKPOINTS  # an interruption after it is in the middle
TINY = (
    "--num-layers 1 --hidden-size 32 --num-attention-heads 2 --seq-length 136 "
    "--max-position-embeddings 136 --micro-batch-size 2 --global-batch-size 4 --eval-iters 2"
)


def words(text: Path, out: Path) -> list[str]:
    """The command that `make pretrain DATA=... OUT=... ITERATIONS=...` runs, made small."""
    flags = ["--data", str(text), "--out", str(out), "--iterations", str(ITERATIONS)]
    return [sys.executable, "-m", "tools.first_run", *flags, "--", *TINY.split()]


@pytest.mark.slow
def test_an_interrupted_first_run_resumes_and_then_is_done(tmp_path: Path) -> None:
    text, out = write_text(tmp_path / "mine.txt", 1200), tmp_path / "out"
    command = words(text, out)
    with Started(command, cwd=ROOT, warm_children=True) as interrupted:
        interrupted.wait_for(f"saved checkpoint at iteration {FIRST_CHECKPOINT} ")
        os.killpg(interrupted.process.pid, signal.SIGINT)  # as Ctrl-C in a terminal
        assert interrupted.ended().status == 130
    reached = int((out / "checkpoints" / TRACKER).read_text())
    assert FIRST_CHECKPOINT <= reached < ITERATIONS
    assert not (out / "sample.txt").exists()

    resumed = run_program(command, cwd=ROOT, within_s=180, warm_children=True)
    assert resumed.status == 0, resumed.text
    assert f"Resuming {out} after {reached} of {ITERATIONS} iterations." in resumed.out
    assert "train a byte-level BPE" not in resumed.out
    places = Places(out)
    assert (places.checkpoints / TRACKER).read_text() == f"{ITERATIONS}\n"
    assert places.picture.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert places.sample.read_text().startswith("The ")
    assert all(str(path) in resumed.out for path in (places.events, places.picture, places.sample))
    assert len(list(places.checkpoints.glob("iter_*"))) == 2
    assert not unfinished(out)

    again = run_program(command, cwd=ROOT, warm_children=True)
    assert again.status == 0, again.text
    assert f"Training is done: {ITERATIONS} of {ITERATIONS} iterations are in {out}." in again.out
    assert "===" not in again.out


def test_a_run_interrupted_before_its_first_checkpoint_starts_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "checkpoints").mkdir()  # as a save that was cut short leaves it
    started: list[str] = []

    def stop(places: Places, data: Path | None) -> None:
        started.append(str(places.root))
        raise KeyboardInterrupt

    monkeypatch.setattr("tools.first_run._prepare", stop)
    with pytest.raises(KeyboardInterrupt):
        main(["--out", str(tmp_path)])
    assert started == [str(tmp_path)]


def test_text_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the text to train on does not exist") as caught:
        main(["--data", str(tmp_path / "none.txt"), "--out", str(tmp_path / "out")])
    assert caught.value.found == f"DATA={tmp_path / 'none.txt'}"
    assert not (tmp_path / "out").exists()


def test_flags_after_two_dashes_come_last_and_so_win(tmp_path: Path) -> None:
    extra = ["--num-layers", "8"]
    command = training_command(Places(tmp_path), iterations=10, ranks=2, extra=extra)
    assert command[-2:] == extra
    assert command.index("--num-layers") < len(command) - 2


def test_a_text_that_has_changed_since_the_run_began_is_refused(tmp_path: Path) -> None:
    text, record = write_text(tmp_path / "mine.txt", 3), tmp_path / "source.json"
    refuse_changed_text(record, text)
    refuse_changed_text(record, text)
    text.write_text("another text")
    with pytest.raises(DataError, match="not the one that this run began with") as caught:
        refuse_changed_text(record, text)
    assert str(text) in str(caught.value.found)
    (tmp_path / "more").mkdir()
    write_text(tmp_path / "more" / "a.txt", 3)
    with pytest.raises(DataError, match="OUT="):
        refuse_changed_text(record, tmp_path / "more")
