"""How likely a model finds given tokens: log-likelihoods of rows, on any tp x pp x dp grid.

For evaluation without training. Each row is scored exactly once, whatever the batch and the number
of replicas; logits are never gathered, and the softmax is over the true vocabulary in fp32 or
wider. Text, tokens and what a score means are the caller's business.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from megatron import device
from megatron.config.run import RunConfig
from megatron.engine.base import MicroBatch
from megatron.engine.cuts import stage_ranges
from megatron.engine.evaluation_memory import (
    EvaluationMemory,
    halve_until_it_fits,
    ran_out,
)
from megatron.errors import ConfigError, DataError
from megatron.model.evaluation_mode import evaluation_mode
from megatron.model.gpt_model import GPTModel, gpt_carry, gpt_layers, most_positions
from megatron.model.losses import LossSum
from megatron.model.specs import Carry, ModelBuild
from megatron.model.stage import PipelineStage
from megatron.mpu.argmax import vocab_parallel_argmax
from megatron.mpu.collectives import all_gather_object
from megatron.mpu.cross_entropy import vocab_parallel_cross_entropy
from megatron.mpu.stage_plan import ranges_of_stage
from megatron.pipeline.executor import Executor, StageWork
from megatron.pipeline.plan import plan_of_run

_NOT_SCORED = -1


class ScoringRow(NamedTuple):
    """Tokens of which those from `first` on are scored, each given all before it in the row."""

    tokens: tuple[int, ...]
    first: int


class RowScore(NamedTuple):
    """The score of the scored tokens of a row."""

    log_likelihood: float  # natural logarithm of their probability, the sum over tokens
    is_greedy: bool  # each of them is the one that greedy choice would take
    num_tokens: int


class Scorer:
    """A GPT on this rank of the grid, ready to score; all ranks make it and call it together.

    Its weights are uninitialised: load them into `stage` first.

    Args:
        micro_batch_size: rows that one replica reads together, at most.
        memory: estimates whether rows fit; without it they are assumed to.
        model: the whole model, where it is there already and there is no pipeline; it is `stage`.
    """

    def __init__(
        self,
        config: RunConfig,
        build: ModelBuild,
        *,
        micro_batch_size: int,
        memory: EvaluationMemory | None = None,
        model: GPTModel | None = None,
    ) -> None:
        build = replace(build, fuse_loss=False)  # scores are made of logits
        self._build, self.micro_batch_size, self._memory = build, micro_batch_size, memory
        self.max_length = most_positions(config.model, build)  # tokens that a row may be read by
        pipeline = plan_of_run(config)
        specs = gpt_layers(config.model, build)
        ranges = stage_ranges(specs, pipeline, build.ctx.pp.size)
        self.stage: nn.Module
        run: Callable[[int, Carry], Carry]
        if model is not None:
            assert build.ctx.pp.size == 1  # noqa: S101  # invariant: a whole model has no stages
            self.stage, run = model, partial(_run_whole, model)
        else:
            with torch.device(device.current()):
                stage = PipelineStage(
                    specs, ranges_of_stage(ranges, build.ctx.pp.rank, build.ctx.pp.size)
                )
            self.stage, run = stage, stage.run
        work = StageWork(run, partial(_scores, build), pipeline.num_chunks)
        self._executor = Executor(work, build.ctx.pp, schedule=pipeline.schedule)

    def score(self, rows: Sequence[ScoringRow]) -> list[RowScore]:
        """Return the scores of `rows`, in their order; input and result are equal on every rank.

        When a replica that is one rank runs out of memory, all of them warn and continue with half
        the rows at a time; scores do not depend on it.

        Raises:
            ConfigError: a row is longer than the model's positions.
            DataError: a row has nothing to score, nothing before it, or an unknown token.
            MachineError: rows do not fit into memory.
        """
        for at, row in enumerate(rows):
            self._check(at, row)
        everyone: dict[int, RowScore] = {}
        # Rows of like length together: shorter ones are filled up to the longest of their batch.
        waiting = sorted(range(len(rows)), key=lambda at: (-len(rows[at].tokens), at))
        size = self.micro_batch_size
        while waiting:
            longest = len(rows[waiting[0]].tokens) - 1
            if self._memory is not None:
                size = self._memory.agreed_rows(min(size, len(waiting)), longest)
            with evaluation_mode(self.stage):
                own = self._score_some(rows, waiting, size)
            gathered = all_gather_object(own, self._build.ctx.world)
            for part in gathered:
                if part is not None:
                    assert not everyone.keys() & part.keys()  # noqa: S101  # invariant: shared out
                    everyone |= part
            waiting = [at for at in waiting if at not in everyone]
            if waiting:
                size = halve_until_it_fits(
                    size, longest, [at for at, part in enumerate(gathered) if part is None]
                )
        return [everyone[at] for at in range(len(rows))]

    def _score_some(
        self, rows: Sequence[ScoringRow], which: Sequence[int], size: int
    ) -> dict[int, RowScore] | None:
        """Return the scores of this rank's share of some rows; None when out of memory."""
        replicas = self._build.ctx.dp
        batches = [which[start : start + size] for start in range(0, len(which), size)]
        own_batches = batches[replicas.rank :: replicas.size]
        found: list[Tensor] = []
        try:
            if own_batches:  # there may be fewer batches than replicas
                each = (self._batch(rows, batch) for batch in own_batches)
                found = self._executor.evaluate(each, len(own_batches))
        except (RuntimeError, MemoryError) as error:
            if not device.is_out_of_memory(error):
                raise
            if self._build.ctx.tp.size * self._build.ctx.pp.size > 1:
                # The ranks that share the model wait inside of it for what will not come.
                raise ran_out(size, len(rows[which[0]].tokens) - 1) from error
            return None
        return dict(_by_row(rows, own_batches, found)) if self._returns_scores else {}

    @property
    def _returns_scores(self) -> bool:
        """Whether this rank is the one of its replica that returns the scores."""
        return self._build.ctx.pp.is_last and self._build.ctx.tp.is_first

    def _batch(self, rows: Sequence[ScoringRow], which: Sequence[int]) -> MicroBatch:
        """Return inputs [b, s] and targets [b, s] of some rows, padded at the end."""
        chosen = [rows[at] for at in which]
        length = max(len(row.tokens) for row in chosen) - 1
        if self._build.sequence_parallel:
            length += -length % self._build.ctx.tp.size
        # No token of a row attends to the padding behind it, so any token may be there.
        inputs = torch.zeros((len(chosen), length), dtype=torch.int64)
        targets = torch.full((len(chosen), length), _NOT_SCORED, dtype=torch.int64)
        for at, row in enumerate(chosen):
            tokens = torch.tensor(row.tokens, dtype=torch.int64)
            inputs[at, : len(tokens) - 1] = tokens[:-1]
            targets[at, row.first - 1 : len(tokens) - 1] = tokens[row.first :]
        here = device.current()
        return MicroBatch(gpt_carry(inputs.to(here)), (targets.to(here),))

    def _check(self, at: int, row: ScoringRow) -> None:
        tokens, first = row
        if not 1 <= first < len(tokens):
            raise DataError(
                "a row has no token to score, or none before the first one",
                found=f"row {at}: {len(tokens)} tokens, scored from number {first} on",
                fix="give each row a token of context, such as the end of a document, and one more",
            )
        unknown = [token for token in tokens if not 0 <= token < self._build.vocab.true]
        if unknown:
            raise DataError(
                "a row holds a token outside of the model's vocabulary",
                found=f"row {at}: token {unknown[0]}, a vocabulary of {self._build.vocab.true}",
                fix="use the tokenizer that the model was trained with",
            )
        if self.max_length is not None and len(tokens) - 1 > self.max_length:
            raise ConfigError(
                "a row is longer than the positions that the model has",
                found=f"row {at}: {len(tokens) - 1} tokens to read, {self.max_length} positions",
                fix="cut it into windows",
            )


def _run_whole(model: GPTModel, chunk: int, carry: Carry) -> Carry:
    return model.run(carry)


def _scores(build: ModelBuild, carry: Carry, labels: Carry) -> LossSum:
    """Return for each row [b] its sum of losses and the number of tokens greedy choice misses."""
    logits, targets = carry[0], labels[0].t()  # [s, b, v/tp], [s, b]
    losses = vocab_parallel_cross_entropy(
        logits, targets, ctx=build.ctx, true_vocab_size=build.vocab.true
    )
    best = vocab_parallel_argmax(logits, ctx=build.ctx, true_vocab_size=build.vocab.true)
    missed = (best != targets) & (targets >= 0)
    return LossSum(losses.sum(dim=0), missed.sum(dim=0).to(losses.dtype))


def _by_row(
    rows: Sequence[ScoringRow], batches: Sequence[Sequence[int]], found: Sequence[Tensor]
) -> Iterator[tuple[int, RowScore]]:
    for which, scores in zip(batches, found):
        for at, loss, missed in zip(which, *scores.tolist()):
            row = rows[at]
            yield at, RowScore(-loss, not missed, len(row.tokens) - row.first)
