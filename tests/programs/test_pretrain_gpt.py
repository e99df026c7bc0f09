"""pretrain_gpt.py as a user starts it: help, a run of two ranks, and every way in which it ends."""

import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron.checkpoint.folder.run_folder import TRACKER
from megatron.config.run import GROUPS
from megatron.errors import CheckpointError, ConfigError
from tests.support.checkpoints.hf_models import save_case
from tests.support.launch import (
    PRETRAIN,
    ROOT,
    Ended,
    Started,
    byte_corpus,
    pretrain_words,
    run_program,
    small_run,
    torchrun_words,
    unfinished,
)

# What scripts that were written for Megatron look for in its step line.
MEGATRON_LINE = re.compile(
    r" iteration +(\d+)/ +(\d+) \| consumed samples: +(\d+) \| consumed tokens: +(\d+) \| "
    r"elapsed time per iteration \(s\): ([\d.]+) \| learning rate: ([\d.E+-]+) \| "
    r"global batch size: +(\d+) \| lm loss: ([\d.E+-]+) \| loss scale: ([\d.]+) \| "
    r"grad norm: ([\d.]+) \| .*number of skipped iterations: +(\d+) \| "
    r"number of nan iterations: +(\d+) \|"
)
MEGATRON_TAGS = {
    "steps-vs-samples/y=steps,x=samples",
    "steps-vs-samples/y=samples,x=steps",
    "steps-vs-tokens/y=steps,x=tokens",
    "steps-vs-tokens/y=tokens,x=steps",
    "learning-rate/learning-rate",
    "learning-rate/learning-rate vs samples",
    "learning-rate/learning-rate vs tokens",
    "batch-size/batch-size",
    "batch-size/batch-size vs samples",
    "lm-loss-training/lm loss",
    "lm-loss-training/lm loss vs samples",
    "lm-loss-training/lm loss vs tokens",
    "loss-scale/loss-scale",
    "loss-scale/loss-scale vs samples",
    "grad-norm/grad-norm",
    "grad-norm/grad-norm vs samples",
    "params-norm/params-norm",
    "num-zeros/num-zeros",
    "iteration-time/iteration-time",
    "iteration-time/iteration-time vs samples",
    "iteration-time/samples per second",
    "iteration-time/TFLOPs per gpu (estimated)",
    "lm-loss-validation/validation/lm loss validation",
    "lm-loss-validation/validation/lm loss validation vs samples",
    "lm-loss-validation/validation/lm loss validation vs tokens",
    "lm-loss-validation/validation/lm loss validation ppl",
    "lm-loss-validation/test/lm loss validation",
}
# Help is answered without torch, in a tenth of a second on a free core.
HELP_WITHIN_S = 10.0


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A corpus of 300 documents and 40 000 bytes."""
    return byte_corpus(tmp_path_factory.mktemp("corpus"))


class Trained:
    """A finished run of two ranks and four iterations, with a checkpoint every two."""

    def __init__(self, prefix: str, folder: Path) -> None:
        self.folder, self.save, self.events = folder, folder / "save", folder / "events"
        self.flags = small_run(
            prefix,
            *("--save", "save", "--load", "save", "--save-interval", "2", "--eval-interval", "2"),
            *("--tensorboard-dir", "events", "--log-timers-to-tensorboard", "--log-params-norm"),
            *("--log-batch-size-to-tensorboard", "--log-num-zeros-in-grad"),
            *("--log-validation-ppl-to-tensorboard", "--global-batch-size", "8"),
        )
        self.done = self.run()

    def run(self, *flags: str) -> Ended:
        """Start it again, under torchrun, from the folder that the paths are relative to."""
        words = torchrun_words(2, PRETRAIN, *self.flags, *flags)
        return run_program(words, cwd=self.folder, warm_children=True)


@pytest.fixture(scope="module")
def trained(prefix: str, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """One run for all tests that only look."""
    return Trained(prefix, tmp_path_factory.mktemp("trained"))


def test_help_lists_every_group_without_importing_torch(tmp_path: Path) -> None:
    words = [sys.executable, "-X", "importtime", PRETRAIN, "--help"]
    ended = run_program(words, cwd=tmp_path, within_s=HELP_WITHIN_S)
    assert ended.status == 0
    assert all(f"\n{name}:" in ended.out for name in GROUPS)
    assert "megatron.arguments" in ended.err
    assert not re.search(r"\| +(torch|numpy)\b", ended.err)


def test_two_ranks_train_evaluate_and_save(trained: Trained) -> None:
    done = trained.done
    assert done.status == 0, done.text
    assert "tp 1 x pp 1 x dp 2" in done.out
    assert (trained.save / TRACKER).read_text() == "4\n"
    names = {path.name for path in trained.save.iterdir()}
    assert names == {TRACKER, "iter_0000002", "iter_0000004"}
    assert "validation loss at iteration 2 |" in done.out
    assert "validation loss at iteration 4 |" in done.out
    assert "test loss at iteration 4 |" in done.out
    assert "stopped: training is complete at iteration 4" in done.out
    assert "memory high-water marks (GiB), where they rose | start " in done.out
    assert not unfinished(trained.folder)


def test_each_iteration_is_said_once_in_a_line_of_megatrons_form(trained: Trained) -> None:
    found = [MEGATRON_LINE.match(line) for line in trained.done.out.splitlines()]
    lines = [match for match in found if match]
    assert [int(line[1]) for line in lines] == [1, 2, 3, 4]
    assert {line[2] for line in lines} == {"4"}
    assert [int(line[3]) for line in lines] == [8, 16, 24, 32]
    assert [int(line[4]) for line in lines] == [8 * 32, 16 * 32, 24 * 32, 32 * 32]
    losses = [float(line[8]) for line in lines]
    assert 5.0 < losses[0] < 6.5  # ln 257 = 5.55, for an untrained model
    assert losses[-1] < losses[0]


def test_tensorboard_has_megatrons_tags(trained: Trained) -> None:
    events = events_in(trained.events)
    assert set(events.Tags()["scalars"]) >= MEGATRON_TAGS
    assert [point.step for point in events.Scalars("lm-loss-training/lm loss")] == [1, 2, 3, 4]
    samples = events.Scalars("lm-loss-training/lm loss vs samples")
    assert [point.step for point in samples] == [8, 16, 24, 32]


def events_in(folder: Path) -> Any:
    """What the one file of a run's TensorBoard folder holds."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (file,) = folder.iterdir()
    events = EventAccumulator(str(file))
    events.Reload()
    return events


def test_a_checkpoint_is_verified_and_one_changed_bit_is_found(
    trained: Trained, tmp_path: Path
) -> None:
    save = tmp_path / "save"
    shutil.copytree(trained.save, save)
    words = [sys.executable, str(ROOT / "tools" / "inspect_checkpoint.py"), str(save), "--verify"]
    good = run_program(words, cwd=tmp_path)
    assert (good.status, good.err) == (0, "")
    assert "iteration 4, written" in good.out
    assert "layout: tp=1 pp=1 dp=2 (2 ranks)" in good.out
    assert "verified: " in good.out
    shard = sorted(save.glob("iter_0000004/shard-*"))[0]
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    bad = run_program(words, cwd=tmp_path)
    assert bad.status == CheckpointError.exit_code
    assert shard.name in bad.err


@pytest.mark.slow
def test_a_finished_run_goes_on_when_it_is_given_more_iterations(
    trained: Trained, tmp_path: Path
) -> None:
    again = object.__new__(Trained)
    again.folder, again.flags = tmp_path, trained.flags
    shutil.copytree(trained.save, tmp_path / "save")
    ended = again.run("--train-iters", "6")
    assert ended.status == 0, ended.text
    assert "validation loss at iteration 6" in ended.out
    assert "successfully loaded checkpoint from save/iter_0000004 at iteration 4" in ended.out
    found = [MEGATRON_LINE.match(line) for line in ended.out.splitlines()]
    assert [(int(line[1]), int(line[3])) for line in found if line] == [(5, 40), (6, 48)]
    assert (tmp_path / "save" / TRACKER).read_text() == "6\n"


def test_a_prolonged_run_evaluates_on_the_first_samples_again(tmp_path: Path) -> None:
    # One evaluation takes 12 of the 16 validation samples; a second one needs more than are left.
    small = byte_corpus(tmp_path, documents=40)
    for iterations in ("1", "2"):
        flags = ["--train-iters", iterations, "--save", "save", "--load", "save"]
        words = pretrain_words(*small_run(small, "--global-batch-size", "12", *flags))
        ended = run_program(words, cwd=tmp_path)
        assert ended.status == 0, ended.text
        assert f"validation loss at iteration {iterations} " in ended.out


def test_a_folder_of_hugging_face_is_tuned_and_resumed_without_flags_of_its_model(
    tmp_path: Path,
) -> None:
    save_case("llama", tmp_path / "hf")
    begins = "--pretrained-checkpoint hf --use-checkpoint-args --load out --save out --mock-data"
    small = "--seq-length 32 --micro-batch-size 2 --train-iters 4 --lr 1e-2 --eval-iters 0"
    words = pretrain_words(*begins.split(), *small.split(), "--log-interval", "1")
    begun = run_program([*words, "--exit-interval", "2"], cwd=tmp_path)
    assert begun.status == 0, begun.text
    assert "out has never held a checkpoint: starting from hf" in begun.out
    resumed = run_program(words, cwd=tmp_path)
    assert resumed.status == 0, resumed.text
    assert "from the checkpoint in out: --num-layers 2" in resumed.out
    assert re.search(r" iteration +4/ +4 \|", resumed.out)


def test_named_groups_are_evaluated_and_logged_each_by_itself(prefix: str, tmp_path: Path) -> None:
    (tmp_path / "valid.txt").write_text(f'"EARLY: 1 0.8:0.9 {prefix}" "LATE: 1 0.9:1 {prefix}"')
    words = small_run(prefix, "--tensorboard-dir", "events", "--data-cache-path", "cache")
    at = words.index("--data-path")
    del words[at : at + 2]
    words += ["--train-weighted-split-paths", f"T: 3 0:0.4 {prefix}, 1 0.4:0.8 {prefix}"]
    words += ["--valid-weighted-split-paths-path", "valid.txt"]
    done = run_program(torchrun_words(2, PRETRAIN, *words), cwd=tmp_path, warm_children=True)
    assert done.status == 0, done.text
    for name in ("EARLY", "LATE"):
        assert f" {name} loss at iteration 4 | lm loss value: " in done.out
    assert "validation loss" not in done.out
    assert "T is a blend of 16 samples:" in done.out
    assert "no --test-weighted-split-paths: nothing is evaluated on test data" in done.out
    tags = events_in(tmp_path / "events").Tags()["scalars"]
    for name in ("EARLY", "LATE"):
        assert f"lm-loss-validation/{name}/lm loss validation" in tags
    refused = run_program(pretrain_words(*words, "--data-path", prefix), cwd=tmp_path)
    assert refused.status == ConfigError.exit_code
    assert "by weighted ranges and by whole paths" in refused.text


def test_an_exit_interval_ends_a_run_that_then_resumes_and_is_done(
    prefix: str, tmp_path: Path
) -> None:
    flags = small_run(prefix, "--save", "save", "--load", "save", "--exit-interval", "3")
    outputs = []
    for _ in range(3):
        ended = run_program(pretrain_words(*flags), cwd=tmp_path)
        assert ended.status == 0, ended.text
        outputs.append(ended.out)
    assert "save has never held a checkpoint: starting from random weights" in outputs[0]
    assert "stopped: exiting program at iteration 3" in outputs[0]
    assert "successfully loaded checkpoint from save/iter_0000003" in outputs[1]
    assert "stopped: training is complete at iteration 4" in outputs[1]
    assert " iteration        4/       4 |" in outputs[1]
    assert "stopped: training is complete at iteration 4" in outputs[2]
    assert not any(MEGATRON_LINE.match(line) for line in outputs[2].splitlines())


FOREVER = ("--train-iters", "1000000", "--eval-iters", "0", "--save", "save")


def test_sigterm_saves_and_ends_well(prefix: str, tmp_path: Path) -> None:
    with Started(pretrain_words(*small_run(prefix, *FOREVER)), cwd=tmp_path) as run:
        run.wait_for(" iteration        2/")
        run.process.terminate()
        ended = run.ended()
    assert ended.status == 0, ended.text
    assert "stopped: SIGTERM was received; exiting program" in ended.out
    assert_saved_last_iteration(tmp_path, ended)


def test_a_file_ends_a_run_while_it_trains_and_before_it_trains(
    prefix: str, tmp_path: Path
) -> None:
    flags = small_run(prefix, *FOREVER, "--load", "save", "--kill-switch-path", "stop")
    with Started(pretrain_words(*flags), cwd=tmp_path) as run:
        run.wait_for(" iteration        2/")
        (tmp_path / "stop").touch()
        ended = run.ended()
    assert ended.status == 0, ended.text
    assert "stopped: Detected kill switch at stop. Exiting" in ended.out
    last = assert_saved_last_iteration(tmp_path, ended)
    again = run_program(pretrain_words(*flags), cwd=tmp_path)
    assert again.status == 0, again.text
    assert "stopped: Detected kill switch at stop. Exiting" in again.out
    assert f" iteration {last + 1:8d}/" not in again.out
    assert (tmp_path / "save" / TRACKER).read_text() == f"{last}\n"


def test_a_duration_ends_a_run(prefix: str, tmp_path: Path) -> None:
    flags = small_run(prefix, *FOREVER, "--exit-duration-in-mins", "0.001")
    ended = run_program(pretrain_words(*flags), cwd=tmp_path)
    assert ended.status == 0, ended.text
    assert "stopped: exiting program after 0.001 minutes" in ended.out
    assert_saved_last_iteration(tmp_path, ended)


def assert_saved_last_iteration(folder: Path, ended: Ended) -> int:
    """Check that the last logged iteration, and no other, was saved."""
    found = [MEGATRON_LINE.match(line) for line in ended.out.splitlines()]
    last = max(int(line[1]) for line in found if line)
    assert (folder / "save" / TRACKER).read_text() == f"{last}\n"
    assert len(list((folder / "save").glob("iter_*"))) == 1
    assert not unfinished(folder)
    return last
