"""Host memory of one node that a run takes beside what its processes are: by purpose.

What a reader would get wrong: pages of corpora and of their index files are not among it, since the
kernel drops them when memory is short; nor is what Python, torch and CUDA take for each process.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron.config.checkpoint import CheckpointConfig
from megatron.config.runtime import DeviceKind
from megatron.data.corpus.weighted_paths import weighted_splits
from megatron.data.data_utils import splits_without_share
from megatron.data.loading.worker_budget import WorkerLoad
from megatron.host import SHARED_MEMORY
from megatron.planning.rehearsal import RankPlan, World, raw_batch
from megatron.planning.saves import checkpoint_bytes

TENSORS, BATCHES, WORKERS, ASYNC_SAVE, LOCAL = (
    "tensors of all ranks",
    "batches that ranks hold, and their pinned copies",
    "batches that data-loader workers have ready",
    "the copy of --async-save",
    "local checkpoints, the new ones beside the former",
)


def host_bytes(world: World, ranks: Sequence[RankPlan], ranks_per_node: int) -> Mapping[str, int]:
    """Return bytes of host memory of a node by purpose, without purposes that take none.

    Args:
        ranks: one of every pipeline stage.
    """
    config, grid = world.config, world.topology
    batch = sum(one.nbytes for one in raw_batch(config, world.task).values())
    workers = WorkerLoad(
        num_workers=config.data.num_workers,
        loaders=_loaders(world),
        readers=max(1, ranks_per_node // (grid.tp * grid.cp)),
        batch_bytes=batch,
    )
    is_cpu = config.launch.device is DeviceKind.CPU
    saves = config.checkpoint.async_save and config.checkpoint.save is not None
    found = {
        TENSORS: ranks_per_node * max(rank.bytes.peak for rank in ranks) if is_cpu else 0,
        BATCHES: ranks_per_node * batch * (1 if is_cpu else 2),
        WORKERS: workers.bytes_in_flight,
        # Each rank copies what it will write: together they write every tensor once.
        ASYNC_SAVE: -(-checkpoint_bytes(ranks) * ranks_per_node // grid.world_size) if saves else 0,
        LOCAL: ranks_per_node * _local_bytes(config.checkpoint, ranks),
    }
    return {purpose: size for purpose, size in found.items() if size}


def _local_bytes(flags: CheckpointConfig, ranks: Sequence[RankPlan]) -> int:
    """Return bytes of the local checkpoints that a rank holds in memory, as it saves one."""
    folder = flags.non_persistent_local_ckpt_dir
    if folder is None or not Path(folder).is_relative_to(SHARED_MEMORY):
        return 0
    state = max(rank.bytes.weights + rank.bytes.optimizer for rank in ranks)
    return 2 * state * (flags.replication_factor if flags.replication else 1)


def _loaders(world: World) -> int:
    """Return how many data loaders a rank has that reads: training, validation and test."""
    data = world.config.data
    if not world.config.training.eval_iters:
        return 1
    splits = weighted_splits(data)
    if splits is not None:
        return 1 + len(splits.valid) + len(splits.test)
    evaluated = 2 - len(splits_without_share(data.split)) if data.is_split else 2
    return 1 + evaluated
