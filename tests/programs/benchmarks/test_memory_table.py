"""The estimate of a step's bytes is what the step allocates, whatever is kept or recomputed."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest

from benchmarks import memory_table
from benchmarks.memory_table import Measured, measure
from benchmarks.peers.plain_gpt import Shape
from benchmarks.train_cpu import our_flags
from megatron.model.accounting import MemoryEstimate
from megatron.ops import cpu_products
from tests.support.call import Call

SHAPE = Shape(layers=4, hidden=256, heads=4, seq_length=256, vocab=2048, micro_batch=2)
# Without instructions for it a product in bf16 takes a hundred times as long as one in fp32.
SMALL = replace(SHAPE, hidden=128, heads=2, seq_length=128)
# What the estimate leaves out: statistics of norms and attention, and the results of one operator
# at a time. Of a model as small as this they are up to a twentieth of all tensors.
LEFT_OUT = 0.05
SELECTIVE = ("--recompute-granularity", "selective", "--recompute-modules")
FULL = ("--recompute-granularity", "full")
TWO_LAYERS = ("--recompute-num-layers", "2")
LLAMA = (
    *("--normalization", "RMSNorm", "--position-embedding-type", "rope", "--swiglu"),
    *("--disable-bias-linear", "--untie-embeddings-and-output-weights"),
)
Cases = Mapping[str, tuple[str, Sequence[str]]]
CASES: Cases = {
    "fp32": ("fp32", ()),
    "act, layernorm": ("fp32", (*SELECTIVE, "act", "layernorm")),
    "mlp": ("fp32", (*SELECTIVE, "mlp")),
    "full": ("fp32", FULL),
    "first two layers": ("fp32", (*FULL, "--recompute-method", "block", *TWO_LAYERS)),
    "bf16": ("bf16", ()),
    "bf16, llama": ("bf16", LLAMA),
}
OTHERS: Cases = {
    "act": ("fp32", (*SELECTIVE, "act")),
    "two layers as one": ("fp32", (*FULL, *TWO_LAYERS)),
    "all logits": ("fp32", ("--no-cross-entropy-loss-fusion",)),
    "gradients as tensors": ("fp32", ("--no-gradient-accumulation-fusion",)),
    "llama": ("fp32", LLAMA),
}


def measure_all(cases: Cases) -> dict[str, Measured]:
    """One after the other in one process, which is why the resident memory is of no interest."""
    # Blocks that CPUs without instructions for half precision widen are not estimated.
    with patch.object(cpu_products, "onednn_multiplies", lambda dtype: True):
        return {
            name: measure(
                [*our_flags(dtype, SMALL if dtype == "bf16" else SHAPE), *more],
                vocab_size=SHAPE.vocab,
            )
            for name, (dtype, more) in cases.items()
        }


def check_estimates(found: Mapping[str, Measured]) -> None:
    for name, one in found.items():
        estimate = one.estimate
        assert estimate.total - estimate.activations == one.kept, name
        assert estimate.total == pytest.approx(one.kept + one.alive, rel=LEFT_OUT), name


@pytest.mark.wide
def test_the_estimate_is_what_a_step_of_other_runs_allocates(tmp_path: Path) -> None:
    check_estimates(Call(tmp_path, "measure", measure_all, OTHERS).value(within_s=120))


def test_the_estimate_is_what_a_step_allocates(tmp_path: Path) -> None:
    found: dict[str, Measured] = Call(tmp_path, "measure", measure_all, CASES).value(within_s=120)
    check_estimates(found)
    # The control: each of these is another number than the first, by more than is left out.
    whole = found["fp32"].kept + found["fp32"].alive
    for name in ("act, layernorm", "mlp", "full", "first two layers"):
        assert found[name].estimate.total != pytest.approx(whole, rel=LEFT_OUT), name


def test_the_table_adds_up() -> None:
    estimate = MemoryEstimate(
        weights=10**6, gradients=10**6, optimizer=2 * 10**6, activations=10**6
    )
    found = Measured(estimate, kept=4 * 10**6, alive=2 * 10**6, imports=7 * 10**6, peak=20 * 10**6)
    rows = [" ".join(row.split()) for row in memory_table.table(found).splitlines()]
    assert "all tensors 5.0 MB 6.0 MB" in rows
    assert "buffers of libraries, code, holes 7.0 MB" in rows
    assert rows[-1].endswith("of all tensors: 0.833")
