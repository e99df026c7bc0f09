"""Over every kind of layout the rank is named that was first, and equal runs are never accused."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.engine.diagnosis import StepDiagnosis
from megatron.engine.native import NativeEngine
from megatron.errors import MegatronError
from megatron.initialize import shutdown_megatron
from megatron.optimizer.sharded_grads import ShardedGradBuffer
from tests.distributed.engine.test_native import PLAN, engine_of
from tests.support.loop_faults import FIRST_FAULTY_RANK, counted_steps
from tests.support.ranks import run_on_ranks
from tests.support.tiny import Record, assert_same_bits, tiny_run, train, write_tiny_corpus
from tests.unit.engine.engines import tiny_batches

MODULE = "layers.1.mlp.fc1"  # its output is this rank's own: of the last stage, of a part, ...
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "pp": {"pipeline_model_parallel_size": 2},
    "zero-bubble": {"pipeline_model_parallel_size": 2, "pipeline_schedule": "zero-bubble"},
    "cp": {"context_parallel_size": 2},
    # With the share of a gradient under way when the backward pass ends.
    "dp": {"data_parallel_sharding_strategy": "optim_grads_params", "overlap_grad_reduce": True},
}
INTERLEAVED = {
    "num_layers": 4,
    "pipeline_model_parallel_size": 2,
    "num_virtual_stages_per_pipeline_rank": 2,
}


@contextmanager
def faulty(change: Callable[[Tensor], Tensor], *, is_on: Callable[[], bool]) -> Iterator[None]:
    """While inside, rank 1 changes what `MODULE` returns whenever `is_on`."""
    build = NativeEngine.__init__

    def changed(module: nn.Module, inputs: object, output: Any) -> Any:
        if not is_on():
            return output
        return (change(output[0]), *output[1:]) if isinstance(output, tuple) else change(output)

    def built(self: NativeEngine, *args: Any) -> None:
        build(self, *args)
        if dist.get_rank() == FIRST_FAULTY_RANK:
            self.stage.get_submodule(MODULE).register_forward_hook(changed)

    with patch.object(NativeEngine, "__init__", built):
        yield


def ended(config: Any) -> str:
    try:
        train(config)
    except MegatronError as error:
        shutdown_megatron()
        return f"{type(error).__name__}: {error.found}"
    return ""


def not_finite(corpus: str) -> dict[str, str]:
    found = {}
    for layout, flags in LAYOUTS.items():
        with counted_steps() as steps, faulty(lambda output: output * math.inf, is_on=steps.any):
            found[layout] = ended(tiny_run(corpus, train_iters=4, **flags))
    return found


def test_the_first_module_that_is_not_finite_is_named_on_all_ranks(tmp_path: Path) -> None:
    corpus = write_tiny_corpus(tmp_path / "corpus")
    zero, one = run_on_ranks(2, not_finite, corpus)
    assert zero == one
    for layout, message in zero.items():
        assert message.startswith("NumericsError: loss nan"), (layout, message)
        place = f"iteration 2; first found rank 1, micro-batch 0, {MODULE}, output (forward): "
        assert place in message, (layout, message)


def bit_flips(corpus: str) -> dict[str, str]:
    """A second pass that differs from the first one by a bit of the output."""
    passes, checksums = [0], StepDiagnosis._checksums

    def counted(self: StepDiagnosis, *args: Any) -> Any:
        passes[0] += 1
        return checksums(self, *args)

    def flipped(output: Tensor) -> Tensor:
        last_bit = torch.finfo(output.dtype).eps * output.detach().abs()
        last_bit.view(-1)[1:] = 0
        return output + last_bit

    found = {}
    for layout, flags in LAYOUTS.items():
        passes[0] = 0
        fault = faulty(flipped, is_on=lambda: passes[0] == 4)  # the second pass of the second check
        with patch.object(StepDiagnosis, "_checksums", counted), fault:
            found[layout] = ended(tiny_run(corpus, train_iters=4, rerun_check_interval=1, **flags))
        found[f"{layout}, passes"] = str(passes[0])
    return found


def test_a_rank_that_computes_other_bits_the_second_time_is_named(tmp_path: Path) -> None:
    corpus = write_tiny_corpus(tmp_path / "corpus")
    zero, one = run_on_ranks(2, bit_flips, corpus)
    assert zero == one
    for layout in LAYOUTS:
        first = f"MachineError: first on rank 1: {MODULE}, output (forward)"
        assert zero[layout].startswith(first), (layout, zero)
        assert zero[f"{layout}, passes"] == "4"


def checked_and_not(corpus: str) -> dict[str, tuple[Record, Record]]:
    shared: dict[str, Any] = {"hidden_dropout": 0.1, "train_iters": 2}
    return {
        layout: (
            train(tiny_run(corpus, rerun_check_interval=1, **shared, **flags)),
            train(tiny_run(corpus, **shared, **flags)),
        )
        for layout, flags in (LAYOUTS | {"interleaved": INTERLEAVED}).items()
    }


def test_checks_accuse_nobody_and_change_no_bit(tmp_path: Path) -> None:
    corpus = write_tiny_corpus(tmp_path / "corpus")
    for of_layouts in run_on_ranks(2, checked_and_not, corpus):
        for checked, plain in of_layouts.values():
            assert len(checked.losses) == 2
            assert_same_bits(checked, plain)


def shares_under_way() -> bool:
    engine = engine_of(1, **LAYOUTS["dp"])
    batches = tiny_batches(1)
    engine.train_step(iter(batches), PLAN)
    engine.diagnosis().check_repeats(batches, PLAN)
    gradients = engine._replica.gradients
    assert isinstance(gradients, ShardedGradBuffer)
    return gradients._running is not None


def test_no_share_of_a_gradient_stays_under_way() -> None:
    """It would be compared before it had arrived."""
    assert run_on_ranks(2, shares_under_way) == [False, False]
