"""Plans for checks: good ones, of which a test changes one thing."""

from collections.abc import Iterable
from typing import Any

from megatron.errors import MegatronError
from megatron.initialize import tokenizer_of
from megatron.launch import Launch
from megatron.preflight.run import Check, RunPlan, collect_findings
from tests.support.tiny import tiny_run


def plan(corpus: str = "nowhere", *, world_size: int = 1, **flags: Any) -> RunPlan:
    """A tiny run on `world_size` ranks of one node, with its tokenizer."""
    config = tiny_run(corpus, **flags)
    launch = Launch(rank=0, world_size=world_size, local_rank=0, local_world_size=world_size)
    return RunPlan(config, launch, tokenizer_of(config))


def found(check: Check, run_plan: RunPlan) -> list[MegatronError]:
    """Return the findings of one check for a plan."""
    return [finding.error for finding in collect_findings(run_plan, [check])]


def only(errors: Iterable[MegatronError], *words: str) -> None:
    """There is exactly one error, and its message holds all of `words`."""
    texts = [str(error) for error in errors]
    assert len(texts) == 1, texts
    missing = [word for word in words if word not in texts[0]]
    assert not missing, f"{missing} not in: {texts[0]}"
