"""Which tokens may follow, so that a text matches a grammar: by the library llguidance.

A tokenizer becomes a table of bytes, in which special tokens stand for no text. A constraint is a
function of the grammar and the tokens so far; what it remembers only saves time. So preemptions,
proposed tokens and other sequences change nothing.
"""

import copy
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper, grammar_from
from numpy.typing import NDArray

from megatron.errors import ConfigError
from megatron.inference.grammar import Grammar, GrammarKind
from megatron.tokenizer.huggingface import LibraryTokenizer
from megatron.tokenizer.protocol import Tokenizer
from megatron.tokenizer.sentence_piece import SentencePieceTokenizer
from megatron.tokenizer.tiktoken_ranks import RankTokenizer
from megatron.tokenizer.token_text import TextRules

Allowed: TypeAlias = NDArray[np.bool_]
_MOST_SHOWN = 300  # characters of the library's message


def grammar_table(rules: TextRules, vocab_size: int) -> "GrammarTable | None":
    """Return the tokens of a tokenizer as a grammar sees them.

    None: no token ends a text, or tokens have no bytes of their own (NullTokenizer, WordPiece).

    Args:
        vocab_size: of the model: ids that the tokenizer does not have stand for no text.
    """
    eod = rules.tokenizer.eod
    return None if eod is None or not rules.is_joined else GrammarTable(rules, vocab_size, eod)


class GrammarTable:
    """The tokens of a tokenizer, from which constraints are made.

    Attributes:
        texts: the bytes of each token; none for special tokens and for those of no text.
        eod: the token that ends a text.
    """

    def __init__(self, rules: TextRules, vocab_size: int, eod: int) -> None:
        tokenizer = rules.tokenizer
        is_special = _special_tokens(tokenizer)
        self.vocab_size = vocab_size
        self.texts = tuple(
            b"" if token >= tokenizer.vocab_size or is_special(token) else rules.bytes_of(token)
            for token in range(vocab_size)
        )
        self._tokenizer, self.eod = tokenizer, eod
        self._tokens = LLTokenizer(_LibraryTokens(self), n_vocab=vocab_size)
        self._limits = LLParserLimits(verbose_errors=False)

    def constraint(self, grammar: Grammar, ends: frozenset[int]) -> "GrammarConstraint":
        """Return what a grammar allows.

        Args:
            ends: tokens that end the sequence; those without text may follow a complete one.

        Raises:
            ConfigError: the grammar is none, has what is not implemented, or is too large; or no
                token could end its texts.
        """
        silent = frozenset(token for token in ends if not self.texts[token])
        if not silent:
            raise ConfigError(
                "a text that has to match a grammar could not end",
                found="no token ends the answer, such as that which ends a document",
                fix="leave ignore_eos out",
            )
        try:
            compiled = grammar_from(grammar.kind.value, grammar.text)
        except ValueError as error:  # of a context-free grammar, which is read in Python
            raise _unusable(grammar, str(error)) from error
        is_wrong, messages = LLMatcher.validate_grammar_with_warnings(
            compiled, self._tokens, limits=self._limits
        )
        matcher = LLMatcher(self._tokens, compiled, log_level=0, limits=self._limits)
        if is_wrong or matcher.is_error():
            raise _unusable(grammar, (messages or [matcher.get_error()])[0])
        return GrammarConstraint(self, matcher, silent)

    def spell(self, text: bytes) -> list[int]:
        """Return the tokens of a text: the tokenizer's own, or the longest that fit one by one."""
        try:
            tokens = self._tokenizer.tokenize(text.decode())
        except Exception:  # bytes of an unfinished character, or text that has no token
            tokens = []
        if tokens and b"".join(self.texts[token] for token in tokens) == text:
            return tokens
        found: list[int] = self._tokens.greedy_tokenize(text.decode(errors="replace"))
        return found


_NAMES = {
    GrammarKind.JSON_SCHEMA: "JSON schema",
    GrammarKind.REGEX: "regular expression",
    GrammarKind.CHOICE: "list of choices",
    GrammarKind.LARK: "grammar",
}


def _unusable(grammar: Grammar, message: str) -> ConfigError:
    return ConfigError(
        f"the {_NAMES[grammar.kind]} cannot be used",
        found=" ".join(message.split())[:_MOST_SHOWN],
        fix="use what llguidance implements: look-around, 'not' and remote schemas are not among "
        "it",
    )


class GrammarConstraint:
    """The tokens that may follow in one sequence; made by `GrammarTable`."""

    def __init__(self, table: GrammarTable, matcher: LLMatcher, ends: frozenset[int]) -> None:
        self._table, self._first, self._ends = table, matcher, ends
        self._matcher = matcher.deep_copy()
        self._consumed: list[int] = []

    def copy(self) -> "GrammarConstraint":
        """Return the same for another sequence."""
        copied = copy.copy(self)
        copied._matcher, copied._consumed = self._matcher.deep_copy(), list(self._consumed)
        return copied

    def allowed(self, output: Sequence[int]) -> Allowed | None:
        """Return which tokens [v] may follow an output; None if the output itself does not match.

        At least one is allowed: an end, also where the library failed (`problem`).
        """
        if not self._follow(output):
            return None
        found = np.zeros(self._table.vocab_size, dtype=np.bool_)
        may_end = True
        if not self._matcher.is_stopped():
            packed = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
            bits = np.unpackbits(packed, count=self._table.vocab_size, bitorder="little")
            found = bits.astype(np.bool_)
            may_end = self._matcher.is_accepting() or self._matcher.is_error()
        found[[self._table.eod, *self._ends]] = False
        found[list(self._ends)] = may_end
        return found

    def problem(self, output: Sequence[int]) -> str | None:
        """Return why an output does not match, or what follows it could not be computed."""
        follows = self._follow(output)
        if self._matcher.is_error():
            message = " ".join(str(self._matcher.get_error()).split())[:_MOST_SHOWN]
            return f"its grammar could not be followed: {message}"
        return None if follows else "its grammar does not allow the tokens that were drawn"

    def _follow(self, output: Sequence[int]) -> bool:
        """Bring the matcher to an output; return whether the output matches so far."""
        known = 0
        while known < min(len(output), len(self._consumed)):
            if output[known] != self._consumed[known]:
                break
            known += 1
        if len(self._consumed) > known:
            # Neither its `rollback` nor its `reset`: what llguidance 1.9.1 then says may follow can
            # be that of tokens taken back.
            self._matcher = self._first.deep_copy()
            self._consumed, known = [], 0
        following = list(output[known:])
        if following:
            count = self._matcher.try_consume_tokens(following)
            self._consumed += following[:count]
        return len(self._consumed) == len(output)


class _LibraryTokens(TokenizerWrapper):
    """What llguidance reads of a tokenizer; its own constructor makes the same of other ones."""

    def __init__(self, table: GrammarTable) -> None:
        self._table = table
        self.is_tokenizer_wrapper = True
        self.eos_token_id, self.bos_token_id = table.eod, None
        self.tokens = list(table.texts)
        self.special_token_ids = [table.eod]

    def __call__(self, s: str) -> list[int]:
        return self._table.spell(s.encode())


def _special_tokens(tokenizer: Tokenizer) -> Callable[[int], bool]:
    """Return which tokens stand for no text, although some have a name that can be shown."""
    named = {
        *(tokenizer.eod, tokenizer.pad, tokenizer.bos, tokenizer.unk),
        *(tokenizer.cls, tokenizer.sep, tokenizer.mask, *tokenizer.extra_ids),
    }
    if isinstance(tokenizer, LibraryTokenizer):
        added = tokenizer.core.get_added_tokens_decoder()
        named |= {token for token, each in added.items() if each.special}
    elif isinstance(tokenizer, SentencePieceTokenizer):
        processor = tokenizer.processor
        size = processor.get_piece_size()
        named |= set(range(size, tokenizer.vocab_size))
        named |= {token for token in range(size) if processor.is_control(token)}
    elif isinstance(tokenizer, RankTokenizer):
        named |= set(range(len(tokenizer.special)))
    return named.__contains__
