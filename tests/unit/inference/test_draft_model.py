"""A small model proposes tokens for a large one, whose texts stay as they are without it."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
import torch

from megatron.errors import ConfigError, NumericsError
from megatron.inference.draft_model import ModelDrafter, check_draft_model
from megatron.inference.forward import ForwardExecutor, SliceResult
from megatron.inference.sampling import SequenceDraw
from megatron.inference.sampling_params import SamplingParams
from megatron.model.gpt_model import GPTModel
from megatron.model.specs import VocabSize
from megatron.mpu.context import ParallelContext
from megatron.scheduling.forward_plan import ForwardPlan
from megatron.scheduling.limits import SchedulerLimits
from megatron.scheduling.requests import Request, RequestState
from tests.support.inference.engine_loop import EngineRun, greedy_draw, run_engine
from tests.support.models import TINY_VOCAB, tiny_build, tiny_config, tiny_model

CTX = ParallelContext.single()
LIMITS = SchedulerLimits(
    blocks=40,
    block_size=4,
    max_length=40,
    vocab_size=TINY_VOCAB.true,
    max_tokens_per_step=16,
    max_sequences=6,
    watermark_blocks=0,
    speculative_tokens=3,
)
PROMPTS = ((7, 3, 9, 1, 5), (7, 3, 9, 1, 5, 2, 8, 6), (4,), (7, 3, 9, 1, 5, 2))


def model_of(seed: int = 5) -> GPTModel:
    torch.manual_seed(seed)
    config = tiny_config(max_position_embeddings=40, num_layers=1 + seed % 2)
    return tiny_model(config).eval().requires_grad_(False)


def requests_of(samples: int) -> list[Request]:
    return [
        Request(id=str(number), prompt=prompt, max_new_tokens=12, arrival_ns=0, samples=samples)
        for number, prompt in enumerate(PROMPTS)
    ]


def draw_sampled(request: Request, choice: int, output: Sequence[int]) -> SequenceDraw:
    params = SamplingParams(temperature=1.3, frequency_penalty=0.5)
    return SequenceDraw(params=params, seed=3, choice=choice, prompt=request.prompt, output=output)


def served(
    draft: GPTModel | None, *, samples: int = 1, blocks: int = 14, greedy: bool = False
) -> EngineRun:
    drafter = None
    if draft is not None:
        drafter = ModelDrafter(ForwardExecutor(draft, CTX, blocks=blocks, block_size=4))
    run = run_engine(
        ForwardExecutor(model_of(), CTX, blocks=blocks, block_size=4),
        requests_of(samples),
        replace(LIMITS, blocks=blocks),
        draw_of=greedy_draw if greedy else draw_sampled,
        drafter=drafter,
    )
    assert {end.state for end in run.ends.values()} == {RequestState.COMPLETED}
    return run


@pytest.mark.parametrize("greedy", [True, False])
def test_all_tokens_that_the_model_itself_proposes_are_right(greedy: bool) -> None:
    # Also those behind a step in which all were right, whose last one it had not computed.
    run = served(model_of(), greedy=greedy)
    assert run.accepted == run.drafted > 20
    alone = served(None, greedy=greedy)
    assert run.tokens == alone.tokens
    assert run.steps < alone.steps / 2


class WatchedExecutor(ForwardExecutor):
    """Checks that nothing is read that was not computed before."""

    written: set[int]

    def run(self, plan: ForwardPlan, draws: Mapping[int, SequenceDraw]) -> list[SliceResult]:
        for part in plan.slices:
            assert self.written >= set(range(part.start)), "a position was left out"
            self.written |= set(range(part.start, part.end))
        return super().run(plan, draws)


def test_a_draft_model_has_computed_every_position_that_it_reads() -> None:
    # That the model itself proposes: in every step all tokens are right.
    executor = WatchedExecutor(model_of(), CTX, blocks=40, block_size=4)
    executor.written = set()
    run = run_engine(
        ForwardExecutor(model_of(), CTX, blocks=40, block_size=4),
        requests_of(1)[:1],
        LIMITS,
        draw_of=draw_sampled,
        drafter=ModelDrafter(executor),
    )
    assert run.accepted == run.drafted > 6
    assert executor.written == set(range(max(executor.written) + 1))


@pytest.mark.parametrize(("samples", "blocks"), [(1, 6), (2, 11)])
def test_texts_are_the_same_whatever_another_model_proposes(samples: int, blocks: int) -> None:
    run = served(model_of(seed=6), samples=samples, blocks=blocks)
    assert run.drafted > run.accepted
    assert run.preemptions > 0
    assert run.tokens == served(None, samples=samples).tokens


def test_a_draft_model_without_finite_scores_is_an_error() -> None:
    draft = model_of(seed=6)
    draft.get_parameter("final_norm.weight").fill_(torch.nan)
    with pytest.raises(NumericsError, match="the scores of the next token are not finite"):
        served(draft)


def test_a_model_of_other_tokens_or_fewer_positions_is_refused() -> None:
    model = model_of()
    check_draft_model(model_of(6), model, 40)
    others = tiny_model(tiny_config(), tiny_build(vocab=VocabSize(51, 56)))
    with pytest.raises(ConfigError, match="has another vocabulary") as caught:
        check_draft_model(others, model, 12)
    assert caught.value.found == "51 tokens, 50 of the model"
    short = tiny_model(tiny_config(max_position_embeddings=12))
    with pytest.raises(ConfigError, match="cannot compute the sequences of the model") as caught:
        check_draft_model(short, model, 13)
    assert caught.value.fix == "use --max-model-len 12"
    prefix = model_of()
    prefix.prompt_is_prefix = True
    with pytest.raises(ConfigError, match="cannot compute the sequences") as caught:
        check_draft_model(prefix, model, 12)
    assert caught.value.found == "a prefix LM"
