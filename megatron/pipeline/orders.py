"""In which order a stage computes, for every kind of schedule; communication is added elsewhere.

An order is a list of rounds: computations between which the stage does not communicate. Gradients
of a chunk are always added up in the order of micro-batches, whatever the schedule.
"""

from megatron.pipeline.action import Action, ActionKind, Round

Order = tuple[Round, ...]


def one_at_a_time(num_microbatches: int) -> Order:
    """Return the order without a pipeline: forward and backward of each micro-batch in turn."""
    return tuple(
        (Action(kind, i, 0),)
        for i in range(num_microbatches)
        for kind in (ActionKind.FORWARD, ActionKind.BACKWARD)
    )


def gpipe(num_microbatches: int) -> Order:
    """Return every forward, then every backward (Huang et al. 2019, arXiv 1811.06965)."""
    return tuple(
        (Action(kind, i, 0),)
        for kind in (ActionKind.FORWARD, ActionKind.BACKWARD)
        for i in range(num_microbatches)
    )


def one_forward_one_backward(stage: int, num_stages: int, num_microbatches: int) -> Order:
    """Return 1F1B: warm up, alternate, drain (Narayanan et al. 2021, 2104.04473, 2.2.1).

    Stage s holds the activations of at most `num_stages` - s micro-batches.
    """
    ahead = min(num_stages - stage - 1, num_microbatches)
    order = [(Action(ActionKind.FORWARD, i, 0),) for i in range(ahead)]
    for i in range(num_microbatches):
        if ahead + i < num_microbatches:
            order.append((Action(ActionKind.FORWARD, ahead + i, 0),))
        order.append((Action(ActionKind.BACKWARD, i, 0),))
    return tuple(order)


def zero_bubble(stage: int, num_stages: int, num_microbatches: int) -> Order:
    """Return ZB-H1: 1F1B with deferred weight gradients (Qi et al. 2023, 2401.10241, 2.3).

    Stage s computes weight gradients s micro-batches late, so the gradient of its input leaves
    earlier, and the weight gradients left over fill the end. No stage holds more than
    `num_stages` micro-batches, which is what stage 0 of 1F1B holds.
    """
    ahead = min(num_stages - stage - 1, num_microbatches)
    order = [(Action(ActionKind.FORWARD, i, 0),) for i in range(ahead)]
    for i in range(num_microbatches):
        if ahead + i < num_microbatches:
            order.append((Action(ActionKind.FORWARD, ahead + i, 0),))
        order.append((Action(ActionKind.BACKWARD_INPUT, i, 0),))
        if i >= stage:
            order.append((Action(ActionKind.BACKWARD_WEIGHT, i - stage, 0),))
    late = range(max(0, num_microbatches - stage), num_microbatches)
    return (*order, *((Action(ActionKind.BACKWARD_WEIGHT, i, 0),) for i in late))


def interleaved(stage: int, num_stages: int, num_microbatches: int, num_chunks: int) -> Order:
    """Return 1F1B over virtual stages (Narayanan et al. 2021, arXiv 2104.04473, 2.2.2).

    A forward and the backward after it are one round: what both produce is exchanged together, as
    Megatron-LM does. Each of them alone would make stages wait: messages run round a ring, so
    that exchanges twice a round only fit together where forward and backward take equally long.
    """
    forwards = _forward_table(num_stages, num_microbatches, num_chunks)
    backwards = [(i, num_chunks - 1 - chunk) for i, chunk in forwards]
    ahead = interleaved_warmup(stage, num_stages, num_microbatches, num_chunks)
    alternate = zip(forwards[ahead:], backwards)
    return (
        *((Action(ActionKind.FORWARD, *item),) for item in forwards[:ahead]),
        *((Action(ActionKind.FORWARD, *f), Action(ActionKind.BACKWARD, *b)) for f, b in alternate),
        *((Action(ActionKind.BACKWARD, *item),) for item in backwards[len(forwards) - ahead :]),
    )


def forward_only(num_stages: int, num_microbatches: int, num_chunks: int) -> Order:
    """Return the forwards of every chunk, interleaved where there are several chunks."""
    table = _forward_table(num_stages, num_microbatches, num_chunks)
    return tuple((Action(ActionKind.FORWARD, *item),) for item in table)


def interleaved_warmup(stage: int, num_stages: int, num_microbatches: int, num_chunks: int) -> int:
    """Return the forwards of a stage before its first backward, when interleaved."""
    longest = microbatch_groups(num_microbatches, num_stages)[0]
    ahead = 2 * (num_stages - stage - 1) + (num_chunks - 1) * longest
    return min(ahead, num_microbatches * num_chunks)


def microbatch_groups(num_microbatches: int, num_stages: int) -> tuple[int, ...]:
    """Return the numbers of micro-batches that a stage runs before it changes its chunk.

    As many groups as there are whole sets of `num_stages`, as equal as they can be, longer ones
    first. So none is shorter than `num_stages`, unless all micro-batches together are. In a shorter
    last group stages would wait for what they sent to come round the ring (5 micro-batches on 4
    stages, as 4 + 1, even for each other, in a circle); Megatron-LM refuses those.
    """
    count = max(1, num_microbatches // num_stages)
    size, longer = divmod(num_microbatches, count)
    return (size + 1,) * longer + (size,) * (count - longer)


def _forward_table(
    num_stages: int, num_microbatches: int, num_chunks: int
) -> list[tuple[int, int]]:
    """Return (micro-batch, chunk) in the order of forwards, the same on every stage."""
    table: list[tuple[int, int]] = []
    start = 0
    for size in microbatch_groups(num_microbatches, num_stages):
        group = range(start, start + size)
        table += [(i, chunk) for chunk in range(num_chunks) for i in group]
        start += size
    return table
