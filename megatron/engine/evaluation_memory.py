"""Whether rows that are only scored fit into memory: an estimate before, and an agreement after.

Rows that are estimated not to fit are refused before the attempt, with a size that fits. Where
memory runs out all the same, ranks go on with fewer rows at a time only when all of them are
notified: inside of a model that is spread over ranks they cannot agree, so there memory is tried
out beforehand.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatron import device, log
from megatron.config.run import RunConfig
from megatron.errors import MachineError
from megatron.host import in_gib
from megatron.model.accounting import RankShare, forward_bytes, memory_bytes
from megatron.model.specs import ModelBuild
from megatron.mpu.collectives import all_reduce

_UNKNOWN = 2**62  # bytes, where the free memory is unknown
# Messages of torch's allocator on CPUs; it has no exception of its own.


@dataclass(frozen=True)
class EvaluationMemory:
    """The memory of the ranks that score with one model; all of them call it together."""

    config: RunConfig
    build: ModelBuild

    def check_weights(self) -> None:
        """Raise MachineError on all ranks when the weights do not fit on one of them."""
        config, share = self.config, self._share(1, self.build.seq_length)
        need = memory_bytes(config.model, self.build.vocab, config.precision, share).weights
        free = self._free_everywhere()
        if need > free:
            raise MachineError(
                "the weights of the model do not fit into memory",
                found=f"about {in_gib(need)} on each rank in {config.precision.precision}; "
                f"{in_gib(free)} are free for it",
                fix="spread the model over more ranks (--tensor-model-parallel-size, "
                "--pipeline-model-parallel-size), or compute with --bf16",
            )

    def agreed_rows(self, rows: int, length: int) -> int:
        """Return how many rows of `length` tokens to read together, equal on all ranks.

        The result is at most `rows`.

        Raises:
            MachineError: they are estimated not to fit on some rank, or not one row does.
        """
        self._check_rows(rows, length)
        while True:
            fits = torch.tensor(int(self._can_be_taken(rows, length)), device=device.current())
            if int(all_reduce(fits, self.build.ctx.world, op="min")):
                return rows
            rows = halve_until_it_fits(rows, length, [])

    def bytes_of(self, rows: int, length: int) -> int:
        """Estimate the bytes, beside the weights, of reading so many rows of so many tokens."""
        config = self.config
        return forward_bytes(
            config.model, self.build.vocab, config.precision, self._share(rows, length)
        )

    def _check_rows(self, rows: int, length: int) -> None:
        need, free = self.bytes_of(rows, length), self._free_everywhere()
        if need <= free:
            return
        fitting = int(free // self.bytes_of(1, length))
        raise MachineError(
            "the rows that are read together do not fit into memory",
            found=f"--micro-batch-size {rows}, the longest row of {length} tokens: about "
            f"{in_gib(need)} on each rank; {in_gib(free)} are free for it",
            fix=f"use --micro-batch-size {fitting}"
            if fitting
            else "use a shorter --seq-length, or spread the model over more ranks "
            "(--tensor-model-parallel-size)",
        )

    def _free_everywhere(self) -> int:
        """Return the free bytes per rank on the rank that has the fewest."""
        free = device.free_memory_bytes()
        free_here = _UNKNOWN if free is None else free
        free_on_rank = torch.tensor(free_here, dtype=torch.int64, device=device.current())
        return int(all_reduce(free_on_rank, self.build.ctx.world, op="min"))

    def _can_be_taken(self, rows: int, length: int) -> bool:
        """Return whether this rank can allocate the memory; it is freed again."""
        try:
            torch.empty(self.bytes_of(rows, length), dtype=torch.uint8, device=device.current())
        except (RuntimeError, MemoryError) as error:
            if not device.is_out_of_memory(error):
                raise
            return False
        return True

    def _share(self, rows: int, length: int) -> RankShare:
        return RankShare(
            tp=self.build.ctx.tp.size,
            sequence_parallel=self.build.sequence_parallel,
            pp=self.build.ctx.pp.size,
            micro_batch_size=rows,
            seq_length=length,
            fuse_gated_units=self.build.fuse_gated_units,
            fuse_rope=self.build.fuse_rope,
            fuse_dropout=self.build.fuse_dropout,
        )


def halve_until_it_fits(rows: int, length: int, ranks: Sequence[int]) -> int:
    """Return half as many rows, with a warning; MachineError when there is only one.

    Args:
        ranks: those that ran out of memory, where that is known.
    """
    if rows == 1:
        raise ran_out(rows, length)
    fewer = rows // 2
    where = f"rank {', '.join(map(str, ranks))}" if ranks else "a rank"
    log.warning(
        f"*** {where} ran out of memory with --micro-batch-size {rows} and rows of up to {length} "
        f"tokens: all ranks go on with {fewer}; scores do not depend on it ***"
    )
    return fewer


def ran_out(rows: int, length: int) -> MachineError:
    """Return the error for rows that cannot be scored with the memory there is."""
    return MachineError(
        "memory ran out while rows were scored",
        found=f"--micro-batch-size {rows}, rows of up to {length} tokens",
        fix=f"use --micro-batch-size {rows // 2}"
        if rows > 1
        else "use a shorter --seq-length, or spread the model over more ranks "
        "(--tensor-model-parallel-size)",
    )
