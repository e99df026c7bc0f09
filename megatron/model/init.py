"""Initial values from (seed, global name) alone: the same for every layout, dtype and device.

Each rank draws the whole tensor on the CPU and keeps its part, which costs time and transient
memory once, and makes a run at tp=8 start from exactly the numbers of a run at tp=1.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from megatron.config.model import ModelConfig
from megatron.errors import MegatronError
from megatron.mpu.context import ParallelContext
from megatron.mpu.partition import Init, InitKind, global_shape, init_of, local_slice, partition_of
from megatron.mpu.random import hash_seed


def weight_init(config: ModelConfig) -> Init:
    """Return the initial distribution of a matrix that does not write to the residual stream."""
    if config.init_method_xavier_uniform:
        return Init(InitKind.XAVIER_UNIFORM)
    return Init(InitKind.NORMAL, std=config.matrix_init_std)


def table_init(config: ModelConfig) -> Init:
    """Return the initial distribution of tables: rows of tokens, positions and kinds of segments.

    muP does not divide it by the width, since each token reads one row.
    """
    if config.init_method_xavier_uniform:
        return Init(InitKind.XAVIER_UNIFORM)
    return Init(InitKind.NORMAL, std=config.init_method_std)


def residual_init(config: ModelConfig) -> Init:
    """Return the initial distribution of a matrix added to the residual stream, 2 per layer."""
    if config.init_method_xavier_uniform:
        return Init(InitKind.XAVIER_UNIFORM)
    return Init(InitKind.NORMAL, std=config.residual_init_std)


@torch.no_grad()
def initialize_parameters(
    model: nn.Module, *, seed: int, ctx: ParallelContext, prefix: str = ""
) -> None:
    """Fill every parameter of a stage from `seed` and its global name, and nothing else.

    Names must be global ones, as `PipelineStage` and `GPTModel` give them; of a module in one of
    these they are with its name as `prefix`.

    Raises:
        MegatronError: a parameter has no rule for its initial values.
    """
    for name, parameter in _named_parameters(model, prefix):
        init = init_of(parameter)
        if init is None:
            raise MegatronError(
                "internal error: a parameter has no rule for its initial values",
                found=name,
                fix="give it an Init with megatron.mpu.partition.set_parameter_metadata() where "
                "it is made",
            )
        if parameter.is_meta:
            continue  # it has no values
        partition = partition_of(parameter)
        index, size = ctx.share(partition)
        if init.kind in (InitKind.ZEROS, InitKind.ONES):
            parameter.fill_(1.0 if init.kind == InitKind.ONES else 0.0)
            continue
        shape = global_shape(parameter.shape, partition, size)
        is_whole = parameter.shape == shape and parameter.is_contiguous()
        if is_whole and parameter.is_cpu and parameter.dtype == torch.float32:
            draw(init, shape, seed=seed, name=name, out=parameter.detach())
        else:
            whole = draw(init, shape, seed=seed, name=name)
            parameter.copy_(local_slice(whole, partition, index, size))
            del whole  # before the next takes memory


def draw(
    init: Init, shape: tuple[int, ...], *, seed: int, name: str, out: Tensor | None = None
) -> Tensor:
    """Return the whole initial tensor of a parameter: float32, on the CPU, padding rows zero.

    Args:
        out: such a tensor, contiguous, which gets the values; None: a new one.
    """
    whole = torch.zeros(shape) if out is None else out.zero_()
    # Padding depends on the layout, so it is neither drawn nor counted in a bound.
    true = whole[: init.true_rows]
    generator = torch.Generator().manual_seed(hash_seed(seed, "init", name))
    if init.kind == InitKind.NORMAL:
        true.normal_(0.0, init.std, generator=generator)
    elif init.kind == InitKind.XAVIER_UNIFORM:
        # Glorot and Bengio 2010, eq. 16; of a stack of matrices each is one.
        rows = true.shape[0] if true.dim() < 3 else true.shape[-2]
        bound = math.sqrt(6.0 / (rows + true.shape[-1]))
        true.uniform_(-bound, bound, generator=generator)
    else:
        true.fill_(1.0 if init.kind == InitKind.ONES else 0.0)
    return whole


def _named_parameters(model: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Parameter]]:
    # Twice the same parameter (tied within a stage) comes once, under its first name.
    yield from model.named_parameters(prefix, remove_duplicate=True)
