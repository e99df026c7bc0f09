"""Fine-tuning has the checks, refusals and reports of the one training loop."""

import io
from collections.abc import Sequence
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron.checkpoint.load import storage
from megatron.errors import MegatronError
from tasks.main import main
from tests.programs.tasks.finetune.runs import PER_EPOCH, Prepared, words_of
from tests.support.loop_faults import counted_steps, other_loss_scale, other_weights, own_disk
from tests.support.ranks import run_on_ranks


class Ended(NamedTuple):
    """How many steps a fine-tuning did, and what ended it."""

    steps: int
    error: str


def run_with_faults(
    words: dict[str, list[str]], other_examples: Sequence[str], folder: str
) -> dict[str, Ended]:
    rank = dist.get_rank()
    faults: dict[str, Any] = {
        "loss scale at the start": other_loss_scale(after=0),
        "loss scale later": other_loss_scale(after=1),
        "weights": other_weights(after=1),
        "disks": own_disk(Path(folder)),
        "examples": nullcontext(),
    }
    found = {}
    for name, fault in faults.items():
        argv = [*words[name], *(other_examples if name == "examples" and rank else ())]
        with counted_steps() as steps, fault:
            try:
                main(argv)
                found[name] = Ended(steps.done, "")
            except MegatronError as error:
                found[name] = Ended(steps.done, str(error))
    return found


def test_what_differs_between_ranks_ends_it_at_the_step_where_it_is_compared(
    prepared: Prepared, tmp_path: Path
) -> None:
    save = tmp_path / "save"
    never = {"epochs": 1, "check_agreement_interval": 0}
    words = {
        "loss scale at the start": words_of(prepared, **never),
        "loss scale later": words_of(prepared, **never | {"check_agreement_interval": 2}),
        "weights": words_of(prepared, **never, save=save, save_interval=3),
        "disks": words_of(prepared, **never, save="save"),
        "examples": words_of(prepared, **never),
    }
    expected = {
        "loss scale at the start": (0, "the ranks are no longer in lockstep"),
        "loss scale later": (2, "loss scale: 1.0 on rank 0, 2.0 on rank 1"),
        "weights": (3, "replicas"),
        "disks": (0, "the nodes do not see one folder for checkpoints"),
        "examples": (0, "the ranks do not see the same data"),
    }
    other = ["--train-data", str(prepared.valid)]
    for found in run_on_ranks(2, run_with_faults, words, other, str(tmp_path)):
        for name, (steps, text) in expected.items():
            assert found[name].steps == steps, f"{name}: {found[name]}"
            assert text in found[name].error, f"{name}: {found[name]}"
    assert storage.never_held_a_checkpoint(save)
    assert storage.never_held_a_checkpoint(save / "last")


def printed(argv: Sequence[str]) -> str:
    """A body for `run_on_ranks`: run it, and return what this rank printed."""
    out = io.StringIO()
    with redirect_stdout(out):
        main(argv)
    return out.getvalue()


def test_the_norm_of_the_parameters_is_reported(prepared: Prepared, tmp_path: Path) -> None:
    flags = {"epochs": 1, "log_interval": 1, "tensorboard_dir": tmp_path}
    (message,) = run_on_ranks(1, printed, words_of(prepared, **flags, log_params_norm=True))
    lines = [line for line in message.splitlines() if line.startswith(" iteration ")]
    assert len(lines) == PER_EPOCH
    assert all("| params norm: " in line for line in lines)
    events = EventAccumulator(str(tmp_path)).Reload()
    norms = [event.value for event in events.Scalars("params-norm/params-norm")]
    assert len(norms) == PER_EPOCH
    assert min(norms) > 0
    assert events.Tags()["tensors"] == ["flags/text_summary"]
    assert "classifier with " in message  # parameters, ranks, samples to go


def test_the_json_of_deepspeed_is_announced_and_stored(prepared: Prepared, tmp_path: Path) -> None:
    flags = {"fp64": False, "deepspeed": True, "zero_stage": 1, "epochs": 1}
    words = words_of(prepared, **flags, tensorboard_dir=tmp_path)
    (message,) = run_on_ranks(1, printed, words, deepspeed=True, timeout_s=120)
    assert "DeepSpeed's JSON, complete:" in message
    assert '"train_batch_size": 8' in message
    stored = EventAccumulator(str(tmp_path)).Reload().Tags()["tensors"]
    assert "deepspeed/text_summary" in stored
