"""Operators beside PyTorch, eager and compiled, and beside the time that their bytes take at least.

Contestants take turns in one process; medians are kept. The floor is the time of a copy of as many
bytes as the operator has to read and write. How to read the table: benchmarks/README.md.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch._functorch.config as functorch_config
import torch.nn.functional as F
from torch import Tensor

from benchmarks.machine import machine
from megatron import device
from megatron.errors import ConfigError
from megatron.ops import library
from megatron.ops.activation import ActivationKind, activate, gated_unit
from megatron.ops.adamw import AdamwRule, AdamwTensors, adamw_step_
from megatron.ops.dropout import dropout_add, is_kept
from megatron.ops.layer_norm import add_layer_norm, layer_norm
from megatron.ops.rms_norm import add_rms_norm, rms_norm
from megatron.ops.rotary import rotate, split_rotated
from megatron.program import run_program

EPSILON = 1e-5
PROBABILITY = 0.1  # of dropout
RULE = AdamwRule(rate=1e-3, beta1=0.9, beta2=0.999, epsilon=1e-8, decay=0.1)
HEAD_WIDTH = 64  # of rotations; widths are multiples of it, and at least three
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# Of the largest value: ours differ from eager PyTorch in fp32 by the rounding of sums, and in bf16
# by the rounding to 8 significant bits of a sum with a residual and of the result.
TOLERANCE = {"fp32": 1e-5, "bf16": 2**-6}

Outputs = tuple[Tensor, ...]


@dataclass(frozen=True)
class Case:
    """One operator: ours and PyTorch's way to the same outputs, and the tensors that move."""

    name: str
    ours: Callable[..., Outputs]
    eager: Callable[..., Outputs]
    inputs: int  # of the shape of a row block; weights are small beside them
    vectors: int
    outputs: float = 1  # likewise
    saved: int = 1  # row blocks that backward reads beside gradients
    # What results are compared with, where PyTorch draws other random numbers than ours.
    expected: Callable[..., Outputs] | None = None

    def moved(self, elements: int, size: int) -> tuple[int, int]:
        """Return the bytes that forward and backward have to read and write.

        Forward reads the inputs and writes the outputs. Backward reads the gradients of the outputs
        and what was saved, and writes one gradient.
        """
        forward, backward = self.inputs + self.outputs, self.outputs + self.saved + 1
        return int(forward * elements * size), int(backward * elements * size)


def _eager_rms(x: Tensor, weight: Tensor) -> Outputs:
    return (F.rms_norm(x, weight.shape, weight, EPSILON),)


def _eager_add_rms(x: Tensor, residual: Tensor, weight: Tensor) -> Outputs:
    added = x + residual
    return F.rms_norm(added, weight.shape, weight, EPSILON), added


def _eager_layer(x: Tensor, weight: Tensor, bias: Tensor) -> Outputs:
    return (F.layer_norm(x, weight.shape, weight, bias, EPSILON),)


def _eager_add_layer(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Outputs:
    added = x + residual
    return F.layer_norm(added, weight.shape, weight, bias, EPSILON), added


def _eager_swiglu(x: Tensor) -> Outputs:
    gate, up = x.chunk(2, dim=-1)
    return (F.silu(gate) * up,)


# Compiled code would compute them again.
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # torch leaves it untyped
def _angles(rows: int, dtype: torch.dtype, where: torch.device) -> tuple[Tensor, Tensor]:
    return _kept_angles(rows, dtype, where)


@lru_cache
def _kept_angles(rows: int, dtype: torch.dtype, where: torch.device) -> tuple[Tensor, Tensor]:
    steps = torch.arange(HEAD_WIDTH // 2, dtype=torch.float64) / (HEAD_WIDTH // 2)
    angles = torch.arange(rows)[:, None, None, None, None] * 10000.0**-steps
    return angles.cos().to(where, dtype), angles.sin().to(where, dtype)


def _rotate(x: Tensor) -> Outputs:
    heads = x.reshape(len(x), 1, -1, 1, HEAD_WIDTH)
    return (rotate(heads, *_angles(len(x), x.dtype, x.device)),)


def _eager_rotate(x: Tensor) -> Outputs:
    heads = x.reshape(len(x), 1, -1, 1, HEAD_WIDTH)
    cos, sin = _angles(len(x), x.dtype, x.device)
    first, second = heads.chunk(2, dim=-1)
    return (torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1),)


def _split_rotated(x: Tensor) -> Outputs:
    grouped = x.reshape(len(x), 1, 1, -1, HEAD_WIDTH)
    return split_rotated(grouped, *_angles(len(x), x.dtype, x.device))


def _eager_split_rotated(x: Tensor) -> Outputs:
    values = x[:, -HEAD_WIDTH:].reshape(len(x), 1, 1, 1, HEAD_WIDTH)
    (turned,) = _eager_rotate(x[:, :-HEAD_WIDTH])
    turned = turned.movedim(2, 3)
    return turned[..., :-1, :], turned[..., -1:, :], values


@lru_cache
def _names(rows: int, where: torch.device) -> tuple[Tensor, Tensor]:
    return torch.tensor(2**40 + 1, device=where), torch.arange(rows, device=where)


def _known_mask(x: Tensor, residual: Tensor) -> Outputs:
    kept = is_kept(x.shape[-1], PROBABILITY, *_names(len(x), x.device)).view(x.shape)
    return (residual + x * kept / (1 - PROBABILITY),)


CASES = (
    Case("rms_norm", lambda x, w: (rms_norm(x, w, EPSILON),), _eager_rms, 1, 1),
    Case("add_rms_norm", lambda x, r, w: add_rms_norm(x, r, w, EPSILON), _eager_add_rms, 2, 1, 2),
    Case("layer_norm", lambda x, w, b: (layer_norm(x, w, b, EPSILON),), _eager_layer, 1, 2),
    Case(
        "add_layer_norm",
        lambda x, r, w, b: add_layer_norm(x, r, w, b, EPSILON),
        _eager_add_layer,
        2,
        2,
        2,
    ),
    Case(
        "gelu_tanh",
        lambda x: (activate(x, ActivationKind.GELU_TANH),),
        lambda x: (F.gelu(x, approximate="tanh"),),
        1,
        0,
    ),
    Case("swiglu", lambda x: (gated_unit(x, ActivationKind.SILU),), _eager_swiglu, 1, 0, 0.5),
    Case("rotate", _rotate, _eager_rotate, 1, 0, saved=0),
    Case("split_rotated", _split_rotated, _eager_split_rotated, 1, 0, saved=0),
    Case(
        "dropout_add",
        lambda x, r: (dropout_add(x, r, PROBABILITY, *_names(len(x), x.device)),),
        lambda x, r: (r + F.dropout(x, PROBABILITY),),
        2,
        0,
        saved=0,
        expected=_known_mask,
    ),
)


@dataclass(frozen=True)
class Turns:
    """How often, and where, everything is measured."""

    device: torch.device
    rounds: int
    compiles: bool = False  # whether PyTorch's way is measured compiled too

    def ways(self, case: Case) -> dict[str, Callable[..., Outputs]]:
        """Return the ways to the outputs of an operator that are compared."""
        ways = {"ours": case.ours, "eager": case.eager}
        return (
            ways | {"compiled": torch.compile(case.eager, dynamic=False)} if self.compiles else ways
        )

    def medians(self, contestants: dict[str, Callable[[], object]]) -> dict[str, float]:
        """Return the median seconds of each contestant; each is first equally often."""
        names = list(contestants)
        seconds: dict[str, list[float]] = {name: [] for name in names}
        for turn in range(self.rounds + 2):
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                self._wait()
                begin = time.perf_counter()
                contestants[name]()
                self._wait()
                if turn >= 2:  # the first are warm-up
                    seconds[name].append(time.perf_counter() - begin)
        return {name: median(ones) for name, ones in seconds.items()}

    def _wait(self) -> None:
        if self.device.type == "cuda":
            device.synchronize()


def main(argv: Sequence[str] | None = None) -> None:
    """Measure every operator, print the table, and write it if asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1024, help="rows, which are tokens")
    parser.add_argument("--widths", type=int, nargs="+", default=[512, 2048], help="of a row")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--rounds", type=int, default=31, help="measurements of each contestant")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--compiled", action="store_true", help="also measure torch.compile")
    parser.add_argument("--json", type=Path, help="file that gets the figures")
    options = parser.parse_args(argv)
    if library.INSTRUCTION_SET is None:
        raise ConfigError(
            "there are no kernels to measure",
            found="megatron/ops/_kernels.so is missing, or of other source",
            fix="python setup.py build_ext --inplace",
        )
    turns = Turns(device.select(options.device, 0), options.rounds, options.compiled)
    rows = [
        row
        for case in CASES
        for name in options.dtypes
        for width in options.widths
        for row in measured(case, (options.rows, width), name, turns)
    ] + [
        measured_update((options.rows, width), name, turns)
        for name in options.dtypes
        for width in options.widths
    ]
    where = {**machine(), "device": options.device, "instruction_set": library.INSTRUCTION_SET}
    print(", ".join(f"{key}: {value}" for key, value in where.items()))
    print(
        "operator        pass     dtype width    ours us   eager us  compiled  copy us  "
        "eager/ours  copy/ours"
    )
    for row in rows:
        compiled = f"{row['compiled_us']:.1f}" if "compiled_us" in row else "-"
        print(
            f"{row['operator']:<15} {row['pass']:<8} {row['dtype']:<5} {row['width']:>5} "
            f"{row['ours_us']:>10.1f} {row['eager_us']:>10.1f} {compiled:>9} "
            f"{row['copy_us']:>8.1f} "
            f"{row['eager_us'] / row['ours_us']:>11.2f} {row['copy_us'] / row['ours_us']:>10.2f}"
        )
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"machine": where, "rows": options.rows, "results": rows}, indent=1)
        options.json.write_text(text + "\n", encoding="utf-8")


def measured(case: Case, shape: tuple[int, int], dtype: str, turns: Turns) -> list[dict[str, Any]]:
    """Return the figures of both passes of one operator, after comparing its results."""
    generator = torch.Generator().manual_seed(0)

    def normal(*size: int) -> Tensor:
        drawn = torch.randn(*size, generator=generator).to(turns.device, DTYPES[dtype])
        return drawn.requires_grad_()

    leaves = [normal(*shape) for _ in range(case.inputs)]
    leaves += [normal(shape[1]) for _ in range(case.vectors)]
    ways = turns.ways(case)
    # Backward passes are repeated: a compiled one must not reuse what its forward pass has saved.
    with functorch_config.patch(donated_buffer=False):
        made = {name: way(*leaves) for name, way in ways.items()}
    grads = [torch.randn_like(one) for one in made["ours"]]

    _compare(case, leaves, grads, made["ours"], TOLERANCE[dtype])
    elements = shape[0] * shape[1]
    passes: dict[str, dict[str, Callable[[], object]]] = {
        "forward": {name: partial(way, *leaves) for name, way in ways.items()},
        "backward": {
            way: lambda outputs=outputs: torch.autograd.grad(  # type: ignore[misc]
                outputs, leaves, grads, retain_graph=True
            )
            for way, outputs in made.items()
        },
    }
    rows = []
    for (name, contestants), moved in zip(
        passes.items(), case.moved(elements, leaves[0].element_size()), strict=True
    ):
        source = torch.empty(moved // 2, dtype=torch.uint8, device=turns.device)  # read and written
        copy = partial(torch.empty_like(source).copy_, source)
        took = turns.medians({**contestants, "copy": copy})
        rows.append(
            {"operator": case.name, "pass": name, "dtype": dtype, "width": shape[1]}
            | {"bytes": moved}
            | {f"{key}_us": seconds * 1e6 for key, seconds in took.items()}
        )
    return rows


def measured_update(shape: tuple[int, int], dtype: str, turns: Turns) -> dict[str, Any]:
    """Return the figures of AdamW of one weight, after comparing its results.

    Weight, state and gradient are in fp32. In bf16 the weight is the master of one in bf16.
    """
    generator = torch.Generator().manual_seed(0)
    start, grad = torch.randn(2, *shape, generator=generator).to(turns.device)
    one = torch.ones((), device=turns.device)
    has_master = dtype != "fp32"
    weights = {way: start.clone() for way in ("ours", "eager")}
    halves = [start.to(DTYPES[dtype]) for _ in weights if has_master]
    means, squares = ([torch.zeros_like(start)] for _ in range(2))
    tensors = AdamwTensors([weights["ours"]], [grad], means, squares, halves[:1])
    rule = torch.optim.AdamW([weights["eager"]], lr=RULE.rate, fused=True)
    rule.param_groups[0]["weight_decay"] = RULE.decay
    weights["eager"].grad = grad.clone()

    def eager() -> None:
        weights["eager"].grad.mul_(one)  # type: ignore[union-attr]
        rule.step()
        if has_master:
            halves[1].copy_(weights["eager"])

    contestants: dict[str, Callable[[], object]] = {
        "ours": lambda: adamw_step_(tensors, RULE, factor=one, applied=one, steps=one),
        "eager": eager,
    }
    for step in contestants.values():
        step()
    torch.testing.assert_close(weights["ours"], weights["eager"], rtol=0, atol=TOLERANCE["fp32"])
    moved = start.numel() * (7 * 4 + (2 if has_master else 0))  # four are read, three written
    source = torch.empty(moved // 2, dtype=torch.uint8, device=turns.device)
    took = turns.medians({**contestants, "copy": partial(torch.empty_like(source).copy_, source)})
    row = {"operator": "adamw", "pass": "update", "dtype": dtype, "width": shape[1], "bytes": moved}
    return row | {f"{key}_us": seconds * 1e6 for key, seconds in took.items()}


def _compare(
    case: Case, leaves: list[Tensor], grads: list[Tensor], made: Outputs, tolerance: float
) -> None:
    """Check our results, and their gradients, against eager PyTorch in fp32."""
    wide = [leaf.detach().float().requires_grad_() for leaf in leaves]
    expected = (case.expected or case.eager)(*wide)
    wide_grads = torch.autograd.grad(expected, wide, [grad.float() for grad in grads])
    found = [*made, *torch.autograd.grad(made, leaves, grads, retain_graph=True)]
    for ours, eager in zip(found, [*expected, *wide_grads], strict=True):
        atol = tolerance * float(eager.detach().abs().max())
        torch.testing.assert_close(ours.float(), eager, rtol=0, atol=atol)


if __name__ == "__main__":
    run_program(main)
