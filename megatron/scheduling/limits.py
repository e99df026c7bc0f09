"""How much a scheduler may plan at once, and which requests are refused when they come."""

from dataclasses import dataclass, fields

from megatron.errors import ConfigError
from megatron.scheduling.requests import Request, RequestError

_MAY_BE_ZERO = {"watermark_blocks", "max_passes", "max_preemptions", "speculative_tokens"}


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    """What an engine has, and how its scheduler shares it out.

    Attributes:
        blocks: blocks of the pool; the fewest of any rank.
        block_size: tokens of a block.
        max_length: positions of the model.
        vocab_size: token ids are below it.
        max_tokens_per_step: tokens that one step computes.
        max_sequences: sequences that run at once.
        max_queued: requests that wait at once; further ones are refused.
        watermark_blocks: blocks that stay free when a request is admitted beside others.
        max_passes: how often a waiting request is passed by later ones.
        max_preemptions: after so many, a request is admitted only with all blocks that it may come
            to need, and is not preempted again.
        speculative_tokens: tokens that may be proposed for a sequence in a step, and are checked
            in it; as far as tokens and blocks are left.
        steps_in_flight: steps that may be planned before the first of them is complete, of disjoint
            requests.
        prompt_is_prefix: all tokens of a prompt see each other, as in a prefix LM: a prompt is
            computed in one step, and its keys and values are of no use to another one.
    """

    blocks: int
    block_size: int = 32
    max_length: int
    vocab_size: int
    max_tokens_per_step: int = 512
    max_sequences: int = 64
    max_queued: int = 1024
    watermark_blocks: int = 1
    max_passes: int = 16
    max_preemptions: int = 3
    speculative_tokens: int = 0
    steps_in_flight: int = 1
    prompt_is_prefix: bool = False

    def __post_init__(self) -> None:
        for field in fields(self):
            if field.name == "prompt_is_prefix":
                continue
            value = getattr(self, field.name)
            least = int(field.name not in _MAY_BE_ZERO)
            if type(value) is not int or value < least:
                raise ConfigError(
                    f"{field.name} of a scheduler is too small",
                    found=f"{field.name} {value!r}",
                    fix=f"use {least} or more",
                )
        if self.max_tokens_per_step < self.max_sequences:
            raise ConfigError(
                "a step has fewer tokens than sequences, so that not every one could go on",
                found=f"max_tokens_per_step {self.max_tokens_per_step}, max_sequences "
                f"{self.max_sequences}",
                fix=f"use max_sequences {self.max_tokens_per_step} or fewer",
            )

    def blocks_for(self, positions: int) -> int:
        """Return the blocks that hold so many positions."""
        return -(-positions // self.block_size)

    def shared_blocks(self, prompt: int) -> int:
        """Return the blocks that samples of a prompt of so many tokens share to their end.

        Each sample computes the last token of the prompt itself, so the block of that token is not
        one of them.
        """
        return (prompt - 1) // self.block_size

    def worst_case_blocks(self, prompt: int, new_tokens: int, samples: int) -> int:
        """Return the most blocks that a request can come to hold.

        The last token of a sample is drawn and never computed, so it has no place in a block.
        """
        shared = self.shared_blocks(prompt)
        return shared + samples * (self.blocks_for(prompt + max(1, new_tokens) - 1) - shared)

    def longest_answer(self, prompt: int, samples: int) -> int:
        """Return the most new tokens that a prompt of so many tokens can have; 0 if none."""
        shared = self.shared_blocks(prompt)
        own = (self.blocks - shared) // samples
        fitting = (shared + own) * self.block_size - prompt + 1
        return max(0, min(fitting, self.max_length - prompt))

    def check_request(self, request: Request) -> None:
        """Check that an idle engine could serve a request to its end.

        Raises:
            RequestError: it could not, whatever else runs.
        """
        self._check_tokens(request)
        if (request.prompt_logprobs or 0) > self.vocab_size:
            raise RequestError(
                "there are not as many tokens as log-probabilities are asked for",
                found=f"{request.prompt_logprobs} of each token in request {request.id!r}, "
                f"vocabulary of {self.vocab_size}",
                fix=f"ask for {self.vocab_size} or fewer",
            )
        prompt, samples = len(request.prompt), request.samples
        if self.prompt_is_prefix:
            self._check_prefix(request)
        if samples > self.max_sequences:
            raise RequestError(
                "a request has more samples than sequences can run at once",
                found=f"{samples} samples, {self.max_sequences} sequences",
                fix=f"ask for {self.max_sequences} samples or fewer",
            )
        longest = self.longest_answer(prompt, samples)
        needed = self.worst_case_blocks(prompt, request.max_new_tokens, samples)
        is_too_long = prompt > self.max_length or needed > self.blocks
        if request.max_new_tokens > longest or is_too_long:
            raise RequestError(
                "a request is longer than the model, or than the memory of its keys and values",
                found=f"{prompt} tokens of prompt and {request.max_new_tokens} new ones in "
                f"{samples} samples: {prompt + request.max_new_tokens} of {self.max_length} "
                f"positions, {needed} of {self.blocks} blocks",
                fix=f"ask for {longest} new tokens or fewer" if longest else "shorten the prompt",
            )

    def _check_prefix(self, request: Request) -> None:
        if len(request.prompt) > self.max_tokens_per_step:
            raise RequestError(
                "a prompt whose tokens see each other is longer than a step",
                found=f"{len(request.prompt)} tokens in request {request.id!r}, a step of "
                f"{self.max_tokens_per_step}",
                fix=f"send {self.max_tokens_per_step} tokens or fewer",
            )
        if request.prompt_logprobs is not None:
            raise RequestError(
                "tokens of a prompt that see those behind them have no log-probabilities",
                found=f"prompt_logprobs {request.prompt_logprobs} in request {request.id!r}, a "
                "prefix LM",
                fix="leave the scores of the prompt out (echo with logprobs)",
            )

    def _check_tokens(self, request: Request) -> None:
        for name, tokens in (("prompt", request.prompt), ("stop_tokens", request.stop_tokens)):
            outside = sorted(token for token in tokens if not 0 <= token < self.vocab_size)
            if outside:
                raise RequestError(
                    f"{name} has a token that the vocabulary does not have",
                    found=f"{outside[0]} in request {request.id!r}",
                    fix=f"use ids from 0 to {self.vocab_size - 1}",
                )
