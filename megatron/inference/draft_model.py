"""A small model proposes tokens for a large one: it computes the same steps over blocks of its own.

Its pool has the blocks of the large model's, and every step is computed in the same ones. So
prefixes that are shared, copies of blocks and preemptions are those of the scheduler. It is whole
on the rank that draws; the others get its proposals with the step.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from megatron.errors import ConfigError
from megatron.inference.forward import ForwardExecutor, require_finite
from megatron.inference.sampling import SequenceDraw
from megatron.model.gpt_model import GPTModel
from megatron.scheduling.forward_plan import ForwardPlan, SequenceSlice


class ModelDrafter:
    """A `Drafter` that draws from a small model, with the random numbers of the large one's draws.

    Args:
        executor: of the small model; its pool is as large as that of the large one.
    """

    def __init__(self, executor: ForwardExecutor) -> None:
        self._executor = executor

    def propose(
        self, plan: ForwardPlan, draws: Mapping[int, SequenceDraw]
    ) -> Mapping[int, Sequence[int]]:
        """Return tokens by sequence; see `Drafter`.

        The first pass computes the plan, each further one the token that the one before drew.

        Raises:
            NumericsError: the scores of the small model are not finite.
        """
        found: dict[int, list[int]] = {part.sequence: [] for part in plan.slices if part.draft_room}
        going = [part for part in plan.slices if part.draft_room]
        step = ForwardPlan(plan.copies, self._first_slices(plan, draws))
        while True:
            after = {
                part.sequence: replace(
                    draws[part.sequence],
                    output=(*draws[part.sequence].output, *found[part.sequence]),
                    top_logprobs=None,
                )
                for part in going
            }
            results = self._executor.run(step, after)
            require_finite({result.sequence: result.is_finite for result in results})
            for result in results:
                if result.tokens:
                    found[result.sequence] += result.tokens
            going = [part for part in going if part.draft_room > len(found[part.sequence])]
            if not going:
                return found
            step = ForwardPlan((), tuple(_next_slice(part, found[part.sequence]) for part in going))

    def _first_slices(
        self, plan: ForwardPlan, draws: Mapping[int, SequenceDraw]
    ) -> tuple[SequenceSlice, ...]:
        """Return the slices of a plan; those with one new token begin one token earlier.

        The last of the proposed tokens of a step is never computed here. If it was right, that is
        made up for now; otherwise the same is written again.
        """
        size = self._executor.cache.block_size
        written = {block for part in plan.slices for block in part.blocks[part.start // size :]}
        slices = []
        for part in plan.slices:
            draw = draws.get(part.sequence)
            first = replace(part, samples=part.draft_room > 0, draft_room=0, prefix=0)
            if draw is not None and len(part.tokens) == 1 and len(draw.output) > 1:
                before = part.start - 1
                # A full block may be of two sequences with equal texts: one of them writes it.
                block = part.blocks[before // size]
                if before // size == part.start // size or block not in written:
                    written.add(block)
                    tokens = (draw.output[-2], *part.tokens)
                    first = replace(first, tokens=tokens, start=before)
            slices.append(first)
        return tuple(slices)


def check_draft_model(draft: GPTModel, model: GPTModel, length: int) -> None:
    """Check that a model can propose tokens for another one, in sequences of so many tokens.

    Raises:
        ConfigError: it has other tokens, fewer positions, or sees prompts in both directions.
    """
    if draft.build.vocab.true != model.build.vocab.true:
        raise ConfigError(
            "the draft model has another vocabulary",
            found=f"{draft.build.vocab.true} tokens, {model.build.vocab.true} of the model",
            fix="use a draft model that was trained with the same tokenizer, or "
            "--speculative ngram",
        )
    if draft.prompt_is_prefix or (draft.max_length is not None and draft.max_length < length):
        raise ConfigError(
            "the draft model cannot compute the sequences of the model",
            found="a prefix LM"
            if draft.prompt_is_prefix
            else f"{draft.max_length} positions for sequences of {length} tokens",
            fix=f"use --max-model-len {draft.max_length}"
            if not draft.prompt_is_prefix
            else "use --speculative ngram",
        )


def _next_slice(part: SequenceSlice, drawn: Sequence[int]) -> SequenceSlice:
    """Return the slice of the newest drawn token."""
    start = part.end + len(drawn) - 1
    return SequenceSlice(part.sequence, (drawn[-1],), start, part.blocks, True)
