"""Update rules as the flags ask for them, with the state they begin from.

torch's AdamW and SGD for those who step them; this package's optimizer steps all rules but SGD
itself (`slot_rules.py`). The owner of the weights (this package's optimizer, or an engine that
shards them) builds its rule here, so that `--optimizer adam` has one meaning.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron.config.optimizer import OptimizerConfig, OptimizerKind, StateDtype


def update_rule(
    weights_by_group: Sequence[Sequence[Tensor]], config: OptimizerConfig
) -> torch.optim.Optimizer:
    """Return AdamW or SGD over groups of weights, without state and with learning rate 0.

    The rules are torch's fused ones: only those skip an update on the device (`found_inf`).
    Who steps it sets learning rate and weight decay of every group first, and gives every weight
    its `fresh_state`.
    """
    groups = [{"params": list(weights)} for weights in weights_by_group]
    if config.optimizer is OptimizerKind.SGD:
        return torch.optim.SGD(groups, lr=0.0, momentum=config.sgd_momentum, fused=True)
    betas = (config.adam_beta1, config.adam_beta2)
    return torch.optim.AdamW(groups, lr=0.0, betas=betas, eps=config.adam_eps, fused=True)


def fresh_state(
    weight: Tensor, config: OptimizerConfig, kind: OptimizerKind | None = None
) -> dict[str, Tensor]:
    """Return the state of `weight` before its first update, in the config's dtypes.

    torch makes the state at the first step. Made here, a checkpoint of iteration 0 is like any
    other, and a lack of memory shows at once. Zeros change no result: the first update of torch
    starts from zeros too (SGD's momentum from 0 * momentum + gradient).

    Args:
        kind: the rule of this weight; None: the one of the config.
    """
    kind = config.optimizer if kind is None else kind
    wide = weight.dtype if weight.is_floating_point() else torch.float32  # of lower halves
    state: dict[str, Tensor] = {
        name: torch.zeros_like(
            weight, dtype=torch.bfloat16 if state_dtype is StateDtype.BF16 else wide
        )
        for name, state_dtype in state_kinds(config, kind).items()
    }
    if kind is OptimizerKind.ADAM:
        # float32 counts exactly to 2^24 updates
        state["step"] = torch.zeros((), dtype=torch.float32, device=weight.device)
    return state


def state_kinds(
    config: OptimizerConfig, kind: OptimizerKind | None = None
) -> dict[str, StateDtype]:
    """Return the state of each weight between updates; FP32 stands for the weight's dtype.

    Args:
        kind: the rule of these weights; None: the one of the config. That of Muon is of matrices.
    """
    match config.optimizer if kind is None else kind:
        case OptimizerKind.SGD:
            return {"momentum_buffer": StateDtype.FP32} if config.sgd_momentum else {}
        case OptimizerKind.LION:
            return {"exp_avg": StateDtype.FP32}
        case OptimizerKind.MUON:
            return {"momentum_buffer": StateDtype.FP32}
        case OptimizerKind.ADAM:
            return {"exp_avg": config.exp_avg_dtype, "exp_avg_sq": config.exp_avg_sq_dtype}
