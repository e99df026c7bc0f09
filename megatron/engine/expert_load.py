"""How many tokens the experts of each layer took in a step, and the biases that follow from it.

Counts are of the whole global batch, so that no split of it over ranks or micro-batches changes a
bias (DeepSeek-V3, arXiv 2412.19437, section 2.1.2; Wang et al. 2024, arXiv 2408.15664, alg. 1).
Nothing here waits for the device.
"""

import re
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from megatron import device
from megatron.config.model import ModelConfig
from megatron.model.experts.router import Router
from megatron.mpu.context import ParallelContext
from megatron.mpu.scalar_sums import ScalarSums

_LOADS = "tokens of experts"
# Among the scalars of a step.
MOST_LOADED, IDLE, DROPPED = "most loaded expert", "idle experts", "dropped tokens"


class ExpertLoads:
    """The loads of all experts of a model, of which this rank has those of its stage."""

    def __init__(self, stage: nn.Module, config: ModelConfig, ctx: ParallelContext) -> None:
        self._routers = {
            _layer_of(name): module
            for name, module in stage.named_modules()
            if isinstance(module, Router)
        }
        # Of the layers that have experts, in order.
        self._rows = {layer: row for row, layer in enumerate(_layers_with_experts(config))}
        self._shape = (len(self._rows), (config.num_experts or 1) + 1)
        self._drops = config.moe_expert_capacity_factor is not None
        self._rate, self._ctx = config.moe_router_bias_update_rate, ctx

    def add_to(self, sums: ScalarSums, *, sequence_parallel: bool) -> None:
        """Add the tokens of every expert of every layer that this rank has counted."""
        loads = torch.zeros(self._shape, dtype=torch.float64, device=device.current())
        for layer, router in self._routers.items():
            loads[self._rows[layer]] = router.taken_load()
        # Without sequence parallelism tensor-parallel ranks have counted the same tokens.
        sums.add(_LOADS, loads, contributes=sequence_parallel or self._ctx.tp.is_first)

    def forget(self) -> None:
        """Forget the tokens that were counted in passes that belong to no step."""
        for router in self._routers.values():
            router.taken_load()

    @torch.no_grad()
    def finish(self, sums: Mapping[str, Tensor], applied: Tensor) -> dict[str, Tensor]:
        """Move the biases if the step was `applied`; return scalars for `step_report`."""
        found = sums[_LOADS].view(self._shape)
        loads, dropped = found[:, :-1], found[:, -1]
        means = loads.mean(dim=1, keepdim=True)
        for layer, router in self._routers.items():
            row = self._rows[layer]
            if router.expert_bias is not None:
                step = torch.sign(means[row] - loads[row]) * self._rate * applied
                router.expert_bias.add_(step)
        drops = {DROPPED: dropped.sum() / loads.sum()} if self._drops else {}
        return drops | {
            MOST_LOADED: (loads.amax(dim=1, keepdim=True) / means).max(),
            IDLE: (loads == 0).sum(),
        }


def _layers_with_experts(config: ModelConfig) -> list[int]:
    return [layer for layer, has_experts in enumerate(config.expert_layers) if has_experts]


def _layer_of(name: str) -> int:
    found = re.match(r"layers\.(\d+)\b", name)
    assert found is not None, name  # noqa: S101  # invariant: routers are in blocks
    return int(found[1])
