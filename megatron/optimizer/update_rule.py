"""torch's update rules as the flags ask for them, with the state they begin from.

The owner of the weights (this package's optimizer, or an engine that shards them) builds its rule
here, so that `--optimizer adam` has one meaning.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron.config.optimizer import OptimizerConfig, OptimizerKind, StateDtype


def update_rule(
    weights_by_group: Sequence[Sequence[Tensor]], config: OptimizerConfig
) -> torch.optim.Optimizer:
    """Return AdamW or SGD over groups of weights, without state and with learning rate 0.

    Who steps it sets learning rate and weight decay of every group first, and gives every weight
    its `fresh_state`.
    """
    groups = [{"params": list(weights)} for weights in weights_by_group]
    fast: dict[str, bool] = {"foreach": True}
    if all(_has_fused_rules(weight) for group in weights_by_group for weight in group):
        fast = {"fused": True}
    if config.optimizer is OptimizerKind.SGD:
        return torch.optim.SGD(groups, lr=0.0, momentum=config.sgd_momentum, **fast)
    betas = (config.adam_beta1, config.adam_beta2)
    return torch.optim.AdamW(groups, lr=0.0, betas=betas, eps=config.adam_eps, **fast)


def fresh_state(weight: Tensor, config: OptimizerConfig) -> dict[str, Tensor]:
    """Return the state of `weight` before its first update, in the config's dtypes.

    torch makes the state at the first step. Made here, a checkpoint of iteration 0 is like any
    other, and a lack of memory shows at once. Zeros change no result: the first update of torch
    starts from zeros too (SGD's momentum from 0 * momentum + gradient).
    """
    state: dict[str, Tensor] = {
        kind: torch.zeros_like(
            weight, dtype=torch.bfloat16 if state_dtype is StateDtype.BF16 else weight.dtype
        )
        for kind, state_dtype in state_kinds(config).items()
    }
    if config.optimizer is OptimizerKind.ADAM:
        # float32 counts exactly to 2^24 updates; fused rules need it on the weight's device
        where = weight.device if _has_fused_rules(weight) else torch.device("cpu")
        state["step"] = torch.zeros((), dtype=torch.float32, device=where)
    return state


def state_kinds(config: OptimizerConfig) -> dict[str, StateDtype]:
    """Return the state of each weight between updates; FP32 stands for the weight's dtype."""
    if config.optimizer is OptimizerKind.SGD:
        return {"momentum_buffer": StateDtype.FP32} if config.sgd_momentum else {}
    return {"exp_avg": config.exp_avg_dtype, "exp_avg_sq": config.exp_avg_sq_dtype}


def _has_fused_rules(weight: Tensor) -> bool:
    return weight.device.type in ("cpu", "cuda")
