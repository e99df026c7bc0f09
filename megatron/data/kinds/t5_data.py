"""The data of a T5: texts with masked spans, windows that have lost spans, or pairs of texts.

The first are cut from sentences and masked as Megatron does for a BERT, with a sentinel for each
span; the second, by --noise-density, have rows of two fixed lengths as T5 v1.1. What a reader would
get wrong: the sequence length is that of the encoder, where a program for a GPT reads inputs and
targets of spans as one sequence.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from megatron.config.data import DataConfig, OnTooLong
from megatron.config.models.encoder_decoder import EncoderDecoderConfig
from megatron.data.corpus.verification_progress import ReportProgress, no_progress
from megatron.data.data_utils import (
    Corpus,
    DatasetMaker,
    DocumentSlice,
    OpenCorpus,
    corpus_opener,
)
from megatron.data.kinds.dataset_kind import (
    DatasetKind,
    flags_unread_by_t5,
    open_of_kind,
    t5_dataset_kind,
)
from megatron.data.kinds.dataset_makers import (
    CorruptedWindows,
    Sentences,
    Vocabulary,
    check_seed,
    span_corruption,
)
from megatron.data.kinds.program_data import ProgramData
from megatron.data.orders.index_cache import IndexCache
from megatron.data.samples.decoder_marks import DecoderMarks
from megatron.data.samples.fim import token_named
from megatron.data.samples.masking import MaskingVocabulary
from megatron.data.samples.mlm_dataset import SpanLengths, span_lengths_of_inputs
from megatron.data.samples.t5_dataset import T5Dataset, T5Recipe
from megatron.data.samples.text_pairs import PairRecipe, TextPairs
from megatron.errors import ConfigError


def t5_data(decoder: EncoderDecoderConfig) -> ProgramData:
    """Return what a program for T5 reads, with rows for this decoder."""
    return ProgramData(
        t5_dataset_kind,
        partial(t5_maker, decoder=decoder),
        partial(_unread_flags, decoder),
        spans=t5_span_lengths,
        has_decoder=True,
    )


def t5_maker(
    data: DataConfig,
    *,
    decoder: EncoderDecoderConfig,
    tokenizer: Vocabulary | None,
    seed: int,
    is_builder: bool,
    report_progress: ReportProgress = no_progress,
) -> DatasetMaker:
    """Return the dataset maker of a T5 program.

    Raises:
        ConfigError: the tokenizer lacks its special tokens or sentinels, or lengths do not work
            out.
    """
    kind = t5_dataset_kind(data)
    if tokenizer is None:
        raise ValueError(f"{kind.value} are not made without a tokenizer")
    rows = decoder_rows(data, decoder)
    if kind is DatasetKind.PAIRS:
        return PairRows(
            open_corpus=corpus_opener(data, is_builder=is_builder, report_progress=report_progress),
            recipe=PairRecipe(
                marks=DecoderMarks.of(tokenizer),
                seq_length=data.seq_length,
                decoder_seq_length=rows.length,
                seed=seed,
                on_too_long=data.on_too_long_document or OnTooLong.SKIP,
            ),
        )
    if kind is DatasetKind.MLM:
        lengths = t5_span_lengths(data)
        return CorruptedWindows(
            open_corpus=corpus_opener(data, is_builder=is_builder, report_progress=report_progress),
            seq_length=lengths.total,
            seed=seed,
            corruption=span_corruption(data, tokenizer),
            last_epoch_cutoff=data.last_epoch_cutoff,
        )
    return masked_texts(
        data,
        tokenizer=tokenizer,
        seed=seed,
        is_builder=is_builder,
        decoder_seq_length=rows.length,
        square_masks=False,
        report_progress=report_progress,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PairRows:
    """Pairs of inputs and targets, a row of each stack for one."""

    open_corpus: OpenCorpus
    recipe: PairRecipe

    def __post_init__(self) -> None:
        check_seed(self.recipe.seed)

    def open(self, prefix: str) -> Corpus:
        """Return two corpora under one prefix."""
        return open_of_kind(DatasetKind.PAIRS, prefix, self.open_corpus)

    def make(
        self, corpus: Corpus, documents: DocumentSlice, *, num_samples: int, cache: IndexCache
    ) -> TextPairs:
        """Return the pairs of `documents`."""
        return TextPairs(
            corpus.source, documents, recipe=self.recipe, num_samples=num_samples, cache=cache
        )

    def epochs(self, dataset: TextPairs, samples: int) -> float:
        """Return passes over the pairs that the first `samples` samples are."""
        return dataset.epochs(samples)


class DecoderRows(NamedTuple):
    """The rows of a decoder: their length, and how much of it the targets fill at most."""

    length: int
    filled: int


def decoder_rows(data: DataConfig, decoder: EncoderDecoderConfig) -> DecoderRows:
    """Return the rows of the decoder; raises ConfigError where targets do not fit into them."""
    given = decoder.decoder_seq_length
    if t5_dataset_kind(data) is not DatasetKind.MLM:
        length = data.seq_length if given is None else given
        return DecoderRows(length, length)
    needed = t5_span_lengths(data).targets + 1  # the dataset has one token more
    if given is not None and given < needed:
        raise ConfigError(
            "the targets of spans do not fit the decoder",
            found=f"{needed} tokens for --seq-length {data.seq_length}, --noise-density "
            f"{data.noise_density}, --mean-noise-span-length {data.mean_noise_span_length}; "
            f"--decoder-seq-length {given}",
            fix=f"use --decoder-seq-length {needed}, or leave it out",
        )
    return DecoderRows(needed if given is None else given, needed)


def t5_span_lengths(data: DataConfig) -> SpanLengths:
    """Return the lengths of spans with which inputs fill the encoder; ConfigError without."""
    density = data.noise_density
    assert density is not None  # noqa: S101  # invariant: of the kind that this flag chooses
    return span_lengths_of_inputs(
        data.seq_length,
        noise_density=density,
        mean_noise_span_length=data.mean_noise_span_length,
    )


def _unread_flags(decoder: EncoderDecoderConfig, data: DataConfig) -> Iterator[ConfigError]:
    yield from flags_unread_by_t5(data)
    try:
        decoder_rows(data, decoder)
    except ConfigError as error:
        yield error


def masked_texts(
    data: DataConfig,
    *,
    tokenizer: Vocabulary,
    seed: int,
    is_builder: bool,
    decoder_seq_length: int,
    square_masks: bool = True,
    report_progress: ReportProgress = no_progress,
) -> DatasetMaker:
    """Return the maker of texts with masked spans, whose decoder reads `decoder_seq_length` tokens.

    Args:
        square_masks: of `T5Dataset`.

    Raises:
        ConfigError: the tokenizer lacks its special tokens or sentinels.
    """
    vocabulary = MaskingVocabulary.of(tokenizer)
    bos, eos = tokenizer.bos, token_named(tokenizer, "[EOS]")
    if bos is None or eos is None or not tokenizer.extra_ids:
        raise ConfigError(
            "the tokenizer lacks tokens that T5 needs",
            found=f"[BOS] {bos}, [EOS] {eos}, and {len(tokenizer.extra_ids)} sentinels",
            fix="use --tokenizer-type BertWordPieceLowerCase with --vocab-extra-ids 100",
        )
    recipe = T5Recipe(
        vocabulary=vocabulary,
        bos=bos,
        eos=eos,
        sentinels=tokenizer.extra_ids,
        seq_length=data.seq_length,
        decoder_seq_length=decoder_seq_length,
        seed=seed,
        masked_lm_prob=data.mask_prob,
        short_seq_prob=data.short_seq_prob,
    )
    return Sentences(
        kind=DatasetKind.T5,
        open_corpus=corpus_opener(data, is_builder=is_builder, report_progress=report_progress),
        seed=seed,
        dataset=partial(T5Dataset, recipe=recipe, square_masks=square_masks),
    )
