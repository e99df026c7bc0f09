"""Whether a forward plan can be executed: blocks of a pool, positions and tokens of a model."""

from collections.abc import Iterator
from dataclasses import dataclass

from megatron.errors import MegatronError
from megatron.scheduling.forward_plan import ForwardPlan


@dataclass(frozen=True, slots=True)
class PlanLimits:
    """What a plan may refer to: blocks of a pool, positions and tokens of a model.

    Attributes:
        positions: the most positions of a sequence; None: no limit.
    """

    blocks: int
    block_size: int
    vocabulary: int
    positions: int | None


def check_plan(plan: ForwardPlan, limits: PlanLimits) -> None:
    """Check that a plan stays within `limits` and writes every block for one sequence at most.

    Raises:
        MegatronError: it does not; a planner is at fault, and nothing was computed.
    """
    for problem, found in _plan_problems(plan, limits):
        raise MegatronError(
            f"internal error: {problem}",
            found=found,
            fix="report it with the requests that led to it",
        )


def _plan_problems(plan: ForwardPlan, limits: PlanLimits) -> Iterator[tuple[str, str]]:
    pool = range(limits.blocks)
    if not plan.slices:
        yield "a forward pass has no tokens", "no slices"
    for copy in plan.copies:
        if not all(block in pool for block in copy):
            yield "a copy names a block that is not there", f"{copy}, {limits.blocks} blocks"
    written: dict[int, int] = {}
    for each in plan.slices:
        name = f"sequence {each.sequence}"
        if not each.tokens or each.start < 0:
            yield "a slice is empty", f"{name}: {len(each.tokens)} tokens from {each.start} on"
        if limits.positions is not None and each.end > limits.positions:
            yield (
                "a slice ends behind the last position",
                f"{name}: {each.end} tokens, {limits.positions} positions",
            )
        if each.start < each.prefix and (each.start > 0 or each.end < each.prefix):
            yield (
                "a slice has a part of its prefix",
                f"{name}: tokens {each.start} to {each.end}, prefix of {each.prefix}",
            )
        if len(each.targets) > len(each.tokens) or each.top_targets > limits.vocabulary:
            yield (
                "a slice asks for more log-probabilities than it has scores",
                f"{name}: {len(each.targets)} targets of {len(each.tokens)} tokens, "
                f"{each.top_targets} likeliest of {limits.vocabulary}",
            )
        if any(not 0 <= token < limits.vocabulary for token in (*each.tokens, *each.targets)):
            yield "a slice has a token that is not in the vocabulary", f"{name}: {each.tokens}"
        if len(each.blocks) * limits.block_size < each.end:
            yield (
                "a block table is too short",
                f"{name}: {len(each.blocks)} blocks of {limits.block_size} for {each.end} tokens",
            )
        if any(block not in pool for block in each.blocks):
            yield "a slice names a block that is not there", f"{name}: {each.blocks}"
        for block in each.blocks[
            each.start // limits.block_size : -(-each.end // limits.block_size)
        ]:
            if written.setdefault(block, each.sequence) != each.sequence:
                yield (
                    "two sequences write one block",
                    f"block {block}: sequences {written[block]} and {each.sequence}",
                )
    if len({each.sequence for each in plan.slices}) < len(plan.slices):
        yield "a sequence has two slices", f"{[each.sequence for each in plan.slices]}"
