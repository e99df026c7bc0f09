"""Proof that a run in FP8 is one: which layers are, that products round as FP8 does, and run.

Asking for FP8 is a demand. A model without one layer in FP8, products that are as exact as
bfloat16, or layers whose products did not run in the first step are errors.
"""

import re
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import NamedTuple

import torch
from torch import nn

from megatron import device, log
from megatron.config.fp8 import Fp8Config, Fp8Format, Fp8Recipe
from megatron.config.run import RunConfig
from megatron.engine.amax_history import AmaxHistories
from megatron.errors import ConfigError, MachineError
from megatron.model.specs import LayerSpec, ModelBuild
from megatron.model.stage import PipelineStage
from megatron.mpu.context import Group
from megatron.mpu.layers import fp8_products
from megatron.ops.fp8_products import Fp8Products
from megatron.ops.scaled_matmul import scaled_matmul_kind

# Root mean square of the relative error of a product of random operands. Rounding to 4 (3) bits is
# uniform up to half a step, 2^-4 (2^-3) of a number in [1, 2): 0.026 (0.053) on average.
_ERRORS = {Fp8Format.E4M3: 0.0375, Fp8Format.HYBRID: 0.0585}
_BAND = 1.5
_PROBE = 256  # a multiple of every recipe's


class Decision(NamedTuple):
    """A module with a matrix: its global name, and why it is not in FP8; None if it is."""

    name: str
    reason: str | None


def decisions(specs: Iterable[LayerSpec]) -> tuple[Decision, ...]:
    """Return what is done with every matrix of a model, building it without values.

    Raises:
        ConfigError: no layer is in FP8.
    """
    table: list[Decision] = []
    for name, spec in {spec.name: spec for spec in specs}.items():
        with torch.device("meta"):
            modules = dict(spec.build().named_modules(prefix=name))
        fp8 = products_of(modules)
        for path, module in modules.items():
            weight = getattr(module, "weight", None)
            if path in fp8:
                table.append(Decision(path, None))
            elif isinstance(weight, nn.Parameter) and weight.dim() > 1:
                table.append(Decision(path, _reason(spec, has_fp8=bool(fp8))))
    if all(decision.reason is not None for decision in table):
        raise ConfigError(
            "FP8 was asked for, and no layer of the model is in FP8",
            found=", ".join(decision.name for decision in table) or "a model without matrices",
            fix="let the linear layers of the model's own list be `.in_fp8(build.fp8)`, or leave "
            "--fp8-format out",
        )
    return tuple(table)


def amax_histories(
    build: ModelBuild, specs: Iterable[LayerSpec], stage: PipelineStage
) -> AmaxHistories | None:
    """Return the histories that the layers of a stage take their scales from, if they do."""
    if build.fp8 is None or build.fp8.fp8_recipe is not Fp8Recipe.DELAYED:
        return None
    return AmaxHistories(
        [name for name, reason in decisions(specs) if reason is None],
        products_of(dict(stage.named_modules())),
        build.fp8,
        build.ctx.world,
    )


def announce(config: RunConfig, specs: Sequence[LayerSpec]) -> None:
    """Log what is in FP8 and what is not; prove that products are FP8 on this device.

    Raises:
        ConfigError: no layer is in FP8.
        MachineError: products are more or less exact than FP8 is.
    """
    dtype = getattr(torch, config.precision.precision.value)
    fp8 = config.fp8
    error, expected = probe(fp8, dtype)
    kind = scaled_matmul_kind(device.current().type, dtype)
    lines = [
        f"FP8: {fp8.fp8_format}, scales {fp8.fp8_recipe}, products {kind}; error of a probe "
        f"{error:.4f}, expected {expected:.4f}"
    ]
    lines += summary(decisions(specs))
    log.info("\n  ".join(lines))


def summary(table: Iterable[Decision]) -> list[str]:
    """Return lines for a table, in which layers that are treated alike are one line."""
    numbers: dict[tuple[str, str | None], list[int]] = {}
    for name, reason in table:
        found = re.search(r"\d+", name)
        pattern = name if found is None else f"{name[: found.start()]}N{name[found.end() :]}"
        at = numbers.setdefault((pattern, reason), [])
        if found is not None:
            at.append(int(found[0]))
    return [
        f"{pattern.replace('N', _ranges(at)) if at else pattern}: "
        + ("FP8" if reason is None else f"not in FP8, {reason}")
        for (pattern, reason), at in numbers.items()
    ]


def probe(config: Fp8Config, dtype: torch.dtype) -> tuple[float, float]:
    """Return the relative error of a product with a gradient, and what FP8's is.

    Raises:
        MachineError: it is not near what the formats of the operands give.
    """
    draw = torch.Generator().manual_seed(0)
    grad, weight = (
        torch.randn(_PROBE, _PROBE, generator=draw, dtype=torch.float64) for _ in range(2)
    )
    # So that operands are exact, and only FP8 rounds them.
    grad, weight = (matrix.bfloat16().double() for matrix in (grad, weight))
    products = fp8_products(config, Group(ranks=(0,), rank=0), splits_output=True)
    here = [matrix.to(device.current(), dtype) for matrix in (grad, weight)]
    _, amax = products.output(here[0], here[1])
    found, _ = products.input_gradient(here[0], here[1], amax)
    exact = grad @ weight
    error = float((found.double().cpu() - exact).norm() / exact.norm())
    assert config.fp8_format is not None  # noqa: S101  # invariant: asked for
    expected = _ERRORS[config.fp8_format]
    if not expected / _BAND < error < expected * _BAND:
        raise MachineError(
            "FP8 was asked for, and products on this device are not rounded as in FP8",
            found=f"relative error {error:.2e} of a product, expected {expected:.2e}",
            fix="use another --fp8-recipe, or leave --fp8-format out",
        )
    return error, expected


def products_of(modules: dict[str, nn.Module]) -> dict[str, Fp8Products]:
    """Return the products of those modules that are in FP8, by name."""
    found = {name: getattr(module, "fp8", None) for name, module in modules.items()}
    return {name: fp8 for name, fp8 in found.items() if isinstance(fp8, Fp8Products)}


class FirstStep:
    """Counts the products of a stage in its first step, made before it."""

    def __init__(self, stage: PipelineStage, *, recomputes: bool) -> None:
        self._products = products_of(dict(stage.named_modules()))
        self._recomputes = recomputes
        self._before = {name: fp8.counts for name, fp8 in self._products.items()}

    def check(self, num_microbatches: int) -> None:
        """Check that every product of every matrix ran once for each micro-batch.

        Outputs may be computed twice where activations are recomputed.

        Raises:
            MachineError: the counts of a layer are others.
        """
        for name, fp8 in self._products.items():
            counts = [after - before for after, before in zip(fp8.counts, self._before[name])]
            outputs, *gradients = counts
            once = num_microbatches * fp8.matrices
            again = once * (1 + self._recomputes)
            if gradients != [once, once * fp8.wgrad] or outputs not in (once, again):
                raise MachineError(
                    "FP8 was asked for, and a layer's products in FP8 did not all run",
                    found=f"{name}: {outputs} outputs, {counts[1]} gradients of inputs and "
                    f"{counts[2]} of weights, in a step of {num_microbatches} micro-batches"
                    + (f" over {fp8.matrices} experts" if fp8.matrices > 1 else ""),
                    fix="leave --fp8-format out, and report the flags: this is an error of the "
                    "program",
                )


def _reason(spec: LayerSpec, *, has_fp8: bool) -> str:
    if not spec.block:
        return "not part of a transformer layer"
    if has_fp8:
        return "not a linear layer of attention, MLP or experts"
    return "one of the first or last layers (--first-last-layers-bf16)"


def _ranges(numbers: Sequence[int]) -> str:
    """Return 0-2,5 for 0, 1, 2, 5."""
    runs = [
        [number for _, number in run]
        for _, run in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0])
    ]
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
