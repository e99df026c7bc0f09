"""Reads the state that Megatron's distributed optimizer keeps in `distrib_optim.pt`.

One flat tensor of each kind for all parameters of a rank, in the order in which its gradient buffer
holds them: the last registered first, each start aligned, cut into buckets. What a reader would get
wrong: padding between buckets is not in the file, so that starts depend on the size of a bucket.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron.checkpoint.files import unpickle
from megatron.errors import CheckpointError

FILE = "distrib_optim.pt"
_ALIGNMENT = 64  # elements; of a parameter's start in the buffer
_COALESCED = "buckets_coalesced"
_KINDS: Mapping[str, str] = {"param": "master", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
_BUCKET_ELEMENTS, _BUCKET_ELEMENTS_OF_REPLICA = 40_000_000, 1_000_000  # Megatron's default size


class BufferParameter(NamedTuple):
    """A parameter in a gradient buffer; `is_shared`: an embedding that two stages have."""

    shape: tuple[int, ...]
    is_shared: bool = False

    @property
    def size(self) -> int:
        """Number of elements."""
        return torch.Size(self.shape).numel()


class BufferPlan(NamedTuple):
    """The start of every parameter in the flat tensors, and their length."""

    starts: tuple[int, ...]
    length: int


def bucket_size(args: Mapping[str, Any], *, stage: int, chunk: int, elements: int) -> int | None:
    """Return the elements after which a run with these flags begins a bucket; None: there is one.

    Args:
        stage: the pipeline stage; only the first one has several buckets.
        chunk: the virtual stage of that rank; only the first one has.
        elements: those of all parameters of the rank.
    """
    if not args.get("overlap_grad_reduce") or stage or chunk:
        return None
    if args.get("ddp_num_buckets"):
        return math.ceil(elements / int(args["ddp_num_buckets"]))
    if args.get("ddp_bucket_size"):
        return int(args["ddp_bucket_size"])
    replicas = int(args.get("data_parallel_size") or 1)
    replicas *= int(args.get("context_parallel_size") or 1)
    return max(_BUCKET_ELEMENTS, _BUCKET_ELEMENTS_OF_REPLICA * replicas)


def buffer_plan(parameters: Sequence[BufferParameter], size: int | None) -> BufferPlan:
    """Return where the parameters of one buffer, in the order of modules, are in the file.

    Args:
        size: elements after which a bucket ends; None: they are one bucket.
    """
    starts: list[int] = []
    bucket, at = 0, 0  # the start of the bucket in the file, and a place in the bucket
    for parameter in reversed(parameters):
        # A bucket that begins with an embedding of two stages begins here, too.
        at = -(-at // _ALIGNMENT) * _ALIGNMENT
        starts.append(bucket + at)
        at += parameter.size
        if parameter.is_shared or (size is not None and at >= size):
            bucket, at = bucket + at, 0
    return BufferPlan(tuple(reversed(starts)), bucket + at)


def read(path: Path) -> list[Mapping[str, Tensor]] | None:
    """Return the flat tensors of all buffers, by our kinds; None for the form before February 2024.

    Raises:
        CheckpointError: the file is damaged, or is of several optimizers.
    """
    content = unpickle.load(path)
    if isinstance(content, list) and len(content) == 1:
        (content,) = content
    if isinstance(content, list):
        raise _error(path, f"states of {len(content)} optimizers, as models with experts have")
    if not isinstance(content, Mapping):
        raise _error(path, f"a {type(content).__name__}")
    if not content.get(_COALESCED):
        return None
    buffers: list[Mapping[str, Tensor]] = []
    for index in sorted(key for key in content if isinstance(key, int)):
        for kinds in _mappings(content[index]):
            flat = {ours: kinds.get(kind) for kind, ours in _KINDS.items()}
            lengths = {t.numel() if isinstance(t, Tensor) else None for t in flat.values()}
            if len(lengths) != 1 or None in lengths:
                raise _error(path, f"buffer {index} lacks one of {', '.join(_KINDS)}")
            buffers.append({kind: t for kind, t in flat.items() if isinstance(t, Tensor)})
    return buffers


def views(
    path: Path,
    flat: Mapping[str, Tensor],
    parameters: Mapping[Any, BufferParameter],
    size: int | None,
) -> dict[str, dict[Any, Tensor]]:
    """Return the state of every parameter of one buffer, by kind, as views of its flat tensors.

    Args:
        parameters: those of the buffer by any key, in the order of modules.

    Raises:
        CheckpointError: the flat tensors are not of these parameters.
    """
    plan = buffer_plan(list(parameters.values()), size)
    found: dict[str, dict[Any, Tensor]] = {}
    for kind, tensor in flat.items():
        if tensor.numel() != plan.length:
            raise _error(
                path,
                f"{tensor.numel():,} elements of {kind}, where the parameters beside it take "
                f"{plan.length:,} in buckets of {size or 'any number of'} elements",
            )
        found[kind] = {
            key: tensor[start : start + parameter.size].view(parameter.shape)
            for (key, parameter), start in zip(parameters.items(), plan.starts)
        }
    return found


def _mappings(value: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the tensors of each pair of dtypes of a buffer."""
    if isinstance(value, Mapping):
        yield from (each for each in value.values() if isinstance(each, Mapping))


def _error(path: Path, found: str) -> CheckpointError:
    return CheckpointError(
        "the state of Megatron's distributed optimizer is not that of the model beside it",
        found=f"{path}: {found}",
        fix="load the weights alone (--finetune), or save it again as torch_dist with "
        "--dist-ckpt-optim-fully-reshardable",
    )
