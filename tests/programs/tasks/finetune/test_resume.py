"""An interrupted fine-tuning that goes on is, bit by bit, the one that was not interrupted."""

import signal
import sys
from pathlib import Path

import pytest

from megatron.checkpoint.load import storage
from tests.programs.tasks.finetune.runs import (
    PER_EPOCH,
    Prepared,
    finetune_all,
    outcomes,
    read,
    refusal,
    refusals,
    words_of,
)
from tests.support.launch import ROOT, Started, run_program
from tests.support.ranks import run_on_ranks

EPOCHS = 3
# In the middle of the second epoch, and of the third.
STOP_AT = 4
assert STOP_AT % PER_EPOCH > 0
assert 2 * STOP_AT < EPOCHS * PER_EPOCH


def tensors(folder: Path) -> dict[str, bytes]:
    """The files of weights and of the optimizer of the newest checkpoint.

    Not those of generators: libraries draw from Python's own when a process first uses them.
    """
    newest = folder / storage.iteration_name(storage.latest_iteration(folder))
    return {
        path.name: path.read_bytes()
        for path in sorted(newest.glob("*.safetensors"))
        if not path.name.startswith("generators")
    }


KINDS: dict[str, tuple[int, dict[str, object]]] = {
    "1 rank": (1, {}),
    "dp 2, bf16": (2, {"bf16": True}),
    "pp 2": (2, {"pipeline_model_parallel_size": 2, "micro_batch_size": 4}),
    "dp 2 by DeepSpeed": (2, {"deepspeed": True, "zero_stage": 1}),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_going_on_is_exact(kind: str, prepared: Prepared, tmp_path: Path) -> None:
    ranks, grid = KINDS[kind]
    flags = {
        "fp64": False,
        "hidden_dropout": 0.1,
        "attention_dropout": 0.1,
        "epochs": EPOCHS,
        **grid,
    }

    def run(name: str, **more: object) -> list[str]:
        folder = tmp_path / name
        files = {"predictions": tmp_path / f"{name}.tsv", "output": tmp_path / f"{name}.json"}
        return words_of(prepared, **flags, **files, save=folder, **more)

    whole = run("whole")
    # The same command line each time, as a scheduler gives it.
    parts = run("parts", load=tmp_path / "parts", exit_interval=STOP_AT)
    run_on_ranks(
        ranks,
        finetune_all,
        [whole, parts, parts, parts],
        deepspeed="deepspeed" in grid,
        timeout_s=180,
    )
    assert read(tmp_path / "parts.json") == read(tmp_path / "whole.json")
    assert (tmp_path / "parts.tsv").read_bytes() == (tmp_path / "whole.tsv").read_bytes()
    for folder in ("", "last"):
        one, other = tmp_path / "whole" / folder, tmp_path / "parts" / folder
        assert storage.latest_iteration(one) == storage.latest_iteration(other)
        assert tensors(one)
        assert tensors(one) == tensors(other)
    assert storage.latest_iteration(tmp_path / "parts" / "last") == EPOCHS * PER_EPOCH


def test_a_run_that_is_complete_judges_its_best_epoch(prepared: Prepared, tmp_path: Path) -> None:
    flags = {"save": tmp_path / "save", "load": tmp_path / "save", "lr": 0.02}
    runs = {
        tmp_path / f"{name}.json": words_of(prepared, **flags, predictions=tmp_path / f"{name}.tsv")
        for name in ("first", "again")
    }
    first, again = outcomes(1, runs)
    assert again == first
    assert (tmp_path / "again.tsv").read_bytes() == (tmp_path / "first.tsv").read_bytes()


def test_a_signal_saves_the_state_and_the_next_start_goes_on(
    prepared: Prepared, tmp_path: Path
) -> None:
    save, output = tmp_path / "save", tmp_path / "a.json"
    words = words_of(prepared, save=save, load=save, output=output, epochs=10_000, log_interval=1)
    program = [sys.executable, "-m", "tasks.main", *words]
    with Started(program, cwd=ROOT) as first:
        first.wait_for(" epoch 1/")
        first.process.send_signal(signal.SIGTERM)
        ended = first.ended()
    assert ended.status == 0, ended.text
    assert "stopped: SIGTERM was received" in ended.out
    assert not output.exists()
    at = storage.latest_iteration(save / "last")
    assert at >= PER_EPOCH
    again = [*program, "--exit-interval", str(at + 1)]
    ended = run_program(again, cwd=ROOT)
    assert ended.status == 0, ended.text
    assert f"last/{storage.iteration_name(at)} at iteration {at}" in ended.out
    assert storage.latest_iteration(save / "last") == at + 1


def test_it_goes_on_with_batches_of_the_same_size(prepared: Prepared, tmp_path: Path) -> None:
    flags = {"save": tmp_path, "load": tmp_path}
    first = words_of(prepared, **flags, exit_interval=STOP_AT)
    _, said = refusals([first, words_of(prepared, **flags, global_batch_size=4)])
    assert "goes on with batches of the size that it began with" in said
    assert "32 samples in 4 iterations, and 4 in each here" in said
    assert "--global-batch-size as it was (8)" in said


def test_there_has_to_be_something_to_go_on_from(prepared: Prepared, tmp_path: Path) -> None:
    save = tmp_path / "save"
    flags = {"save": save, "load": save, "pretrained_checkpoint": None}
    message = refusal(words_of(prepared, **flags))
    assert "there is no interrupted fine-tuning to go on with" in message


def test_a_state_without_its_optimizer_is_not_kept(prepared: Prepared, tmp_path: Path) -> None:
    save = tmp_path / "save"
    flags = {"save": save, "no_save_optim": True, "epochs": 1}
    run_on_ranks(1, finetune_all, [words_of(prepared, **flags)])
    assert storage.latest_iteration(save) == PER_EPOCH
    assert storage.never_held_a_checkpoint(save / "last")
