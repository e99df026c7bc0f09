"""The generation settings of a task of lm-eval-harness: read from its dictionary, or refused.

The harness passes on the task's dictionary as it is. A setting that is unknown here is an error:
the generated text would differ from the one that the task is defined for.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron.errors import ConfigError, DataError
from megatron.inference.sampling_params import SamplingParams

MOST_NEW = 256  # tokens, where a task has no limit
_LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
_KNOWN = frozenset({"until", "do_sample", "temperature", "top_k", "top_p", *_LENGTHS})


@dataclass(frozen=True)
class GenerationRequest:
    """The settings of one generation; requests of equal settings may share a batch."""

    until: tuple[str, ...]  # texts that end it; they are not part of it
    new_tokens: int
    params: SamplingParams

    def is_over(self, text: str) -> bool:
        """Return whether the text contains one of the stop texts."""
        return any(stop in text for stop in self.until)

    def cut(self, text: str) -> str:
        """Return the text before the first stop text."""
        ends = [at for stop in self.until if (at := text.find(stop)) >= 0]
        return text[: min(ends)] if ends else text


def generation_request(given: Mapping[str, Any]) -> GenerationRequest:
    """Return the settings of a request, by default greedy with `MOST_NEW` tokens.

    Raises:
        ConfigError: a wish that is not known here, or whose value has no meaning.
    """
    unknown = sorted(set(given) - _KNOWN)
    if unknown:
        raise ConfigError(
            "a task has a setting of generation that is not supported",
            found=", ".join(f"{name}={given[name]!r}" for name in unknown),
            fix=f"set it otherwise with --gen-kwargs; known are {', '.join(sorted(_KNOWN))}",
        )
    until = given.get("until") or ()
    until = (until,) if isinstance(until, str) else tuple(until)
    new = int(next((given[name] for name in _LENGTHS if given.get(name) is not None), MOST_NEW))
    temperature = float(given.get("temperature") or 0.0)
    does_sample = given.get("do_sample")
    if does_sample is None:
        does_sample = temperature > 0
    params = SamplingParams(greedy=True)
    if does_sample and "temperature" in given and temperature == 0:
        does_sample = False  # the harness's word for greedy choice
    if does_sample:
        params = SamplingParams(
            temperature=temperature or 1.0,
            top_k=int(given.get("top_k") or 0),
            top_p=float(given.get("top_p") or 0.0),
        )
    return GenerationRequest(tuple(stop for stop in until if stop), new, params)


def fitting(tokens: list[int], settings: GenerationRequest, longest: int) -> list[int]:
    """Return the end of a context that leaves room for the new tokens."""
    room = longest - settings.new_tokens
    if room < 1:
        raise DataError(
            "a task needs longer texts than the model can generate",
            found=f"{settings.new_tokens} new tokens, a model of {longest} positions",
            fix=f"add --gen-kwargs max_gen_toks={max(longest // 2, 1)}",
        )
    return tokens[-room:]
