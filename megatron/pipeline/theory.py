"""The literature's formulas for a schedule: its bubble, and how many activations are alive.

Closed formulas, to hold simulations and runs against. All assume stages of equal cost and messages
that take no time.
"""

from megatron.pipeline.orders import interleaved_warmup
from megatron.pipeline.schedule import ScheduleName


def bubble_share(
    name: str, *, num_stages: int, num_microbatches: int, num_chunks: int = 1
) -> float:
    """Return the part of a step, from 0 to 1, in which a stage is idle.

    With p stages, m micro-batches and v chunks:

    - GPipe and 1F1B: (p - 1) / (m + p - 1), for any times of forward and backward.
    - interleaved: (p - 1) / (v m + p - 1), for m >= p and any times (Narayanan et al. 2021, section
      2.2.2; their formula assumes that p divides m, this one does not, see
      `orders.microbatch_groups`). For m < p each chunk waits p slots: (v m + (v - 1)(p - m) + p -
      1) slots for v m of work.
    - zero-bubble: (p - 1) / (3 m + p - 1), for m >= p, and where forward, input gradient and
      weight gradient take equally long (Qi et al. 2023, table 2: a bubble of
      (p - 1)(T_F + T_B - T_W)). For m < p there are too few weight gradients to fill the end.
    """
    stages, batch = num_stages, num_microbatches
    short = max(0, stages - batch)
    if name == ScheduleName.NONE:
        return 0.0
    if name == ScheduleName.ZERO_BUBBLE:
        idle, work = stages - 1 + short, 3 * batch
    elif name == ScheduleName.INTERLEAVED:
        idle, work = stages - 1 + (num_chunks - 1) * short, num_chunks * batch
    else:
        idle, work = stages - 1, batch
    return idle / (work + idle)


def peak_activations(
    name: str, *, num_stages: int, num_microbatches: int, num_chunks: int = 1
) -> tuple[int, ...]:
    """Return for each stage the most micro-batches in a chunk whose activations are alive.

    Alive from the forward until the last backward action. Chunks are smaller than stages: divide
    by `num_chunks` to compare interleaving with the others.
    """
    stages, batch = num_stages, num_microbatches
    if name == ScheduleName.NONE:
        return (1,) * stages
    if name == ScheduleName.GPIPE:
        return (batch,) * stages
    if name == ScheduleName.ZERO_BUBBLE:
        return (min(stages, batch),) * stages
    if name == ScheduleName.INTERLEAVED:
        ahead = [interleaved_warmup(s, stages, batch, num_chunks) for s in range(stages)]
        return tuple(min(each + 1, batch * num_chunks) for each in ahead)
    return tuple(min(stages - stage, batch) for stage in range(stages))
