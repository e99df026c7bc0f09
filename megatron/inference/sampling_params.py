"""What changes the scores of the next token before it is chosen, and who may be chosen."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from megatron.config.fields import check_field, raise_all
from megatron.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Changes of scores, temperature, and limits on the tokens that may be sampled.

    Scores change first: the number of each (token, number) in `logit_bias` is added to that of the
    token; those of tokens of prompt and output are divided by `repetition_penalty` if positive,
    else multiplied (Keskar et al. 2019, arXiv 1909.05858, section 4.1); `presence_penalty`, and
    `frequency_penalty` for each time, are subtracted from those of tokens of the output (OpenAI).

    The limits apply one after the other: temperature, then the `top_k` likeliest (0: all), then
    the likeliest whose probabilities first add up to `top_p` (Holtzman et al. 2019,
    arXiv 1904.09751; 0 or 1: all), then those at least `min_p` times as likely as the likeliest
    (Nguyen et al. 2024, arXiv 2407.01082; 0: all).

    Raises:
        ConfigError: a value outside its range, or limits together with greedy choice.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 0.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    greedy: bool = False

    def __post_init__(self) -> None:
        raise_all(self._problems())

    @property
    def has_limits(self) -> bool:
        """Whether some tokens cannot be chosen although their probability is not zero."""
        return self.top_k > 0 or 0 < self.top_p < 1 or self.min_p > 0

    @property
    def has_penalties(self) -> bool:
        """Whether scores depend on the tokens before."""
        return self.repetition_penalty != 1 or self.has_output_penalties

    @property
    def has_output_penalties(self) -> bool:
        """Whether scores depend on the tokens that were generated."""
        return self.presence_penalty != 0 or self.frequency_penalty != 0

    def _problems(self) -> Iterator[ConfigError]:
        yield from check_field(
            0 < self.temperature < math.inf,
            "temperature",
            self.temperature,
            problem="the sampling temperature is not a positive number",
            fix="use 1.0, or --greedy for the likeliest token",
        )
        yield from check_field(
            self.top_k >= 0,
            "top_k",
            self.top_k,
            problem="the number of candidate tokens is negative",
            fix="use 0 for no limit",
        )
        yield from check_field(
            0 <= self.top_p <= 1,
            "top_p",
            self.top_p,
            problem="the probability of the candidate tokens is outside [0, 1]",
            fix="use 0.9, or 0 for no limit",
        )
        yield from self._limit_problems()
        yield from self._penalty_problems()

    def _limit_problems(self) -> Iterator[ConfigError]:
        if not 0 <= self.min_p <= 1:
            yield ConfigError(
                "the least probability of a candidate token, beside the likeliest, is outside "
                "[0, 1]",
                found=f"min_p {self.min_p}",
                fix="use 0.05, or 0 for no limit",
            )
        limits = (self.top_k, self.top_p, self.min_p)
        if self.greedy and (any(limits) or self.temperature != 1):
            yield ConfigError(
                "greedy choice leaves nothing to sample",
                found=f"--greedy, --temperature {self.temperature}, --top-k {self.top_k}, "
                f"--top-p {self.top_p}, min_p {self.min_p}",
                fix="drop --greedy, or the other ones",
            )

    def _penalty_problems(self) -> Iterator[ConfigError]:
        if not 0 < self.repetition_penalty < math.inf:
            yield ConfigError(
                "the penalty of repeated tokens is not a positive number",
                found=f"repetition_penalty {self.repetition_penalty}",
                fix="use 1.1, or 1.0 for none",
            )
        for name in ("presence_penalty", "frequency_penalty"):
            if not math.isfinite(getattr(self, name)):
                yield ConfigError(
                    "a penalty of generated tokens is not a finite number",
                    found=f"{name} {getattr(self, name)}",
                    fix="use a number from -2 to 2, or 0 for none",
                )
        for token, bias in self.logit_bias:
            # -inf would leave no token if it were given for all of them.
            if token < 0 or not math.isfinite(bias):
                yield ConfigError(
                    "the bias of a token cannot be added to its score",
                    found=f"logit_bias {bias} of token {token}",
                    fix="use token ids, and finite numbers such as -100 to exclude a token",
                )
        tokens = [token for token, _ in self.logit_bias]
        if len(set(tokens)) < len(tokens):
            yield ConfigError(
                "a token has two biases",
                found=f"logit_bias of tokens {tokens}",
                fix="give each token one bias, such as their sum",
            )
