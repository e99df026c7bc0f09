"""Each kind of dataset as a value that the builder of `data_utils` makes splits and blends of.

`gpt_maker` is for programs that train a decoder and takes the kind from the flags; programs for
BERT, T5 and inverse cloze select their own kind. What a reader would get wrong: special tokens
(marks, sentinels, padding) come from the tokenizer, and a kind that lacks one is refused here,
before anything is opened.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np

from megatron.config.data import DataConfig, OnTooLong
from megatron.data.bert_dataset import BERTDataset, BERTRecipe
from megatron.data.blendable_dataset import SampleDataset
from megatron.data.corpus.verification_progress import ReportProgress, no_progress
from megatron.data.data_utils import (
    Corpus,
    DatasetMaker,
    DocumentSlice,
    OpenCorpus,
    corpus_opener,
    named_prefixes,
)
from megatron.data.gpt_dataset import GPTDataset
from megatron.data.kinds.dataset_kind import DatasetKind, dataset_kind, open_of_kind
from megatron.data.orders.index_cache import IndexCache
from megatron.data.samples.fim import (
    FIMDataset,
    FIMTokenNames,
    FIMTokens,
    PieceVocabulary,
    checked_eod,
    fim_tokens,
)
from megatron.data.samples.ict_dataset import ICTDataset, ICTRecipe
from megatron.data.samples.masking import MaskingVocabulary, WordPieces
from megatron.data.samples.mlm_dataset import MLMDataset, SpanCorruption
from megatron.data.samples.mock_dataset import MockDataset
from megatron.data.samples.packed_mtf_dataset import PackedMTFDataset
from megatron.data.samples.packing import PackedDataset
from megatron.data.samples.sft_dataset import SFTDataset
from megatron.errors import ConfigError, DataError

_MOCK_DOCUMENTS = 1_000_000  # what --split divides where there is no corpus


class Vocabulary(PieceVocabulary, WordPieces, Protocol):
    """The interface of a tokenizer for all kinds."""

    @property
    def eod(self) -> int | None:
        """The id that ends a document."""

    @property
    def bos(self) -> int | None:
        """The id that opens a text."""

    @property
    def extra_ids(self) -> tuple[int, ...]:
        """The sentinels that --vocab-extra-ids added."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Windows:
    """Token windows of shuffled documents."""

    open_corpus: OpenCorpus
    seq_length: int
    seed: int
    last_epoch_cutoff: float = 0.95

    def __post_init__(self) -> None:
        check_seed(self.seed)

    def open(self, prefix: str) -> Corpus:
        """Return a corpus of which each item is a document."""
        return open_of_kind(DatasetKind.GPT, prefix, self.open_corpus)

    def make(
        self, corpus: Corpus, documents: DocumentSlice, *, num_samples: int, cache: IndexCache
    ) -> GPTDataset:
        """Return the windows over `documents`."""
        return GPTDataset(
            corpus.source,
            name=documents.name,
            documents=np.arange(documents.start, documents.stop),
            num_samples=num_samples,
            seq_length=self.seq_length,
            seed=self.seed,
            cache=cache,
            last_epoch_cutoff=self.last_epoch_cutoff,
        )

    def epochs(self, dataset: GPTDataset, samples: int) -> float:
        """Return passes over the documents that `samples` windows are."""
        return samples * dataset.seq_length / dataset.plan.tokens_per_epoch


@dataclass(frozen=True, slots=True, kw_only=True)
class FilledWindows:
    """Windows with a share of their documents rearranged (arXiv 2207.14255)."""

    windows: Windows
    tokens: FIMTokens
    eod: int | None
    rate: float
    spm_rate: float

    def __post_init__(self) -> None:
        checked_eod(self.tokens, self.eod, rate=self.rate, spm_rate=self.spm_rate)

    def open(self, prefix: str) -> Corpus:
        """Return a corpus of which each item is a document."""
        return self.windows.open(prefix)

    def make(
        self, corpus: Corpus, documents: DocumentSlice, *, num_samples: int, cache: IndexCache
    ) -> FIMDataset:
        """Return the rearranged windows over `documents`."""
        return FIMDataset(
            self.windows.make(corpus, documents, num_samples=num_samples, cache=cache),
            tokens=self.tokens,
            eod=self.eod,
            rate=self.rate,
            spm_rate=self.spm_rate,
            seed=self.windows.seed,
        )

    def epochs(self, dataset: Any, samples: int) -> float:
        """Return passes over the documents that `samples` windows are."""
        return self.windows.epochs(dataset.dataset, samples)


@dataclass(frozen=True, slots=True, kw_only=True)
class MockWindows:
    """Made-up windows, divided by --split like those of a corpus, and read from none."""

    seq_length: int
    seed: int
    vocab_size: int
    eod: int | None

    def __post_init__(self) -> None:
        check_seed(self.seed)

    def open(self, prefix: str) -> Corpus:
        """Return a corpus without files, of as many documents as shares are told apart by."""
        return Corpus(prefix, None, _MOCK_DOCUMENTS, (), np.empty(0, np.int64))

    def make(
        self, corpus: Corpus, documents: DocumentSlice, *, num_samples: int, cache: IndexCache
    ) -> MockDataset:
        """Return as many windows as are asked for, of the split's name."""
        del corpus, cache
        if documents.start == documents.stop:
            raise DataError(
                f"the {documents.name} split has no share of the made-up data",
                found=f"documents {documents.start} to {documents.stop} of {_MOCK_DOCUMENTS}",
                fix="give it a larger part with --split",
            )
        return MockDataset(
            name=documents.name,
            num_samples=num_samples,
            seq_length=self.seq_length,
            seed=self.seed,
            vocab_size=self.vocab_size,
            eod=self.eod,
        )

    def epochs(self, dataset: MockDataset, samples: int) -> None:
        """Return None: no sample comes twice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CorruptedWindows:
    """Inputs that lack spans, and targets that are the spans (T5 v1.1), of fixed lengths."""

    open_corpus: OpenCorpus
    seq_length: int
    seed: int
    corruption: SpanCorruption
    last_epoch_cutoff: float

    def __post_init__(self) -> None:
        check_seed(self.seed)
        self.corruption.marks(self.corruption.lengths(self.seq_length).spans)

    def open(self, prefix: str) -> Corpus:
        """Return a corpus of which each item is a document."""
        return open_of_kind(DatasetKind.MLM, prefix, self.open_corpus)

    def make(
        self, corpus: Corpus, documents: DocumentSlice, *, num_samples: int, cache: IndexCache
    ) -> MLMDataset:
        """Return the windows over `documents`, each in two parts."""
        return MLMDataset(
            corpus.source,
            documents,
            corruption=self.corruption,
            num_samples=num_samples,
            seq_length=self.seq_length,
            seed=self.seed,
            cache=cache,
            last_epoch_cutoff=self.last_epoch_cutoff,
        )

    def epochs(self, dataset: MLMDataset, samples: int) -> float:
        """Return passes over the documents that `samples` windows are."""
        return samples * dataset.windows.seq_length / dataset.windows.plan.tokens_per_epoch


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedRows:
    """Rows of whole dialogues or pairs."""

    kind: DatasetKind
    open_corpus: OpenCorpus
    seq_length: int
    seed: int
    pad: int
    on_too_long: OnTooLong | None = None

    def __post_init__(self) -> None:
        check_seed(self.seed)

    def open(self, prefix: str) -> Corpus:
        """Return two corpora under one prefix."""
        return open_of_kind(self.kind, prefix, self.open_corpus)

    def make(
        self, corpus: Corpus, documents: DocumentSlice, *, num_samples: int, cache: IndexCache
    ) -> PackedDataset:
        """Return the rows of `documents`."""
        dataset = SFTDataset if self.kind is DatasetKind.SFT else PackedMTFDataset
        return dataset(
            corpus.source,
            documents,
            num_samples=num_samples,
            seq_length=self.seq_length,
            seed=self.seed,
            pad=self.pad,
            cache=cache,
            on_too_long=self.on_too_long,
        )

    def epochs(self, dataset: PackedDataset, samples: int) -> float:
        """Return passes over the documents that the first `samples` rows are."""
        return dataset.epochs(samples)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sentences:
    """Samples of BERT, T5 or inverse cloze; `dataset` makes one with a bound recipe."""

    kind: DatasetKind
    open_corpus: OpenCorpus
    seed: int
    dataset: Callable[..., SampleDataset]

    def __post_init__(self) -> None:
        check_seed(self.seed)

    def open(self, prefix: str) -> Corpus:
        """Return a corpus of which each item is a sentence."""
        return open_of_kind(self.kind, prefix, self.open_corpus)

    def make(
        self, corpus: Corpus, documents: DocumentSlice, *, num_samples: int, cache: IndexCache
    ) -> SampleDataset:
        """Return the samples over `documents`."""
        return self.dataset(corpus.source, documents, num_samples=num_samples, cache=cache)

    def epochs(self, dataset: object, samples: int) -> float | None:
        """Return None: samples of all epochs are shuffled together."""
        return None


def gpt_maker(
    data: DataConfig,
    *,
    tokenizer: Vocabulary | None,
    seed: int,
    is_builder: bool,
    report_progress: ReportProgress = no_progress,
) -> DatasetMaker:
    """Return the dataset maker of a GPT program; plain windows need no tokenizer.

    Raises:
        ConfigError: the tokenizer lacks tokens that the kind needs, or lengths do not work out.
    """
    kind = dataset_kind(data)
    open_corpus = corpus_opener(data, is_builder=is_builder, report_progress=report_progress)
    windows = Windows(
        open_corpus=open_corpus,
        seq_length=data.seq_length,
        seed=seed,
        last_epoch_cutoff=data.last_epoch_cutoff,
    )
    if kind is DatasetKind.GPT:
        return windows
    if tokenizer is None:
        raise ValueError(f"{kind.value} are not made without a tokenizer")
    if kind is DatasetKind.MOCK:
        return MockWindows(
            seq_length=data.seq_length,
            seed=seed,
            vocab_size=tokenizer.vocab_size,
            eod=tokenizer.eod,
        )
    if kind.is_packed:
        return PackedRows(
            kind=kind,
            open_corpus=open_corpus,
            seq_length=data.seq_length,
            seed=seed,
            # Padding is identified by its segment, so any id of the model is valid.
            pad=next((id_ for id_ in (tokenizer.pad, tokenizer.eod) if id_ is not None), 0),
            on_too_long=data.on_too_long_document,
        )
    if kind is DatasetKind.MLM:
        return CorruptedWindows(
            open_corpus=open_corpus,
            seq_length=data.seq_length,
            seed=seed,
            corruption=span_corruption(data, tokenizer),
            last_epoch_cutoff=data.last_epoch_cutoff,
        )
    names = FIMTokenNames(data.fim_prefix_token, data.fim_suffix_token, data.fim_middle_token)
    return FilledWindows(
        windows=windows,
        tokens=fim_tokens(tokenizer, names),
        eod=tokenizer.eod,
        rate=data.fim_rate,
        spm_rate=data.fim_spm_rate,
    )


def span_corruption(data: DataConfig, tokenizer: Vocabulary) -> SpanCorruption:
    """Return how much of a window is replaced, and by which tokens of the vocabulary."""
    return SpanCorruption(
        sep=tokenizer.eod if tokenizer.sep is None else tokenizer.sep,
        sentinels=tokenizer.extra_ids,
        noise_density=0.15 if data.noise_density is None else data.noise_density,
        mean_noise_span_length=data.mean_noise_span_length,
    )


def bert_maker(
    data: DataConfig,
    *,
    tokenizer: Vocabulary | None,
    seed: int,
    is_builder: bool,
    report_progress: ReportProgress = no_progress,
) -> DatasetMaker:
    """Return the dataset maker of a BERT program; raises ConfigError without a [MASK] token."""
    if tokenizer is None:
        raise ValueError(f"{DatasetKind.BERT.value} are not made without a tokenizer")
    recipe = BERTRecipe(
        vocabulary=MaskingVocabulary.of(tokenizer),
        seq_length=data.seq_length,
        seed=seed,
        masked_lm_prob=data.mask_prob,
        short_seq_prob=data.short_seq_prob,
        binary_head=data.bert_binary_head,
    )
    return Sentences(
        kind=DatasetKind.BERT,
        open_corpus=corpus_opener(data, is_builder=is_builder, report_progress=report_progress),
        seed=seed,
        dataset=partial(BERTDataset, recipe=recipe),
    )


def ict_maker(
    data: DataConfig,
    *,
    tokenizer: Vocabulary | None,
    seed: int,
    is_builder: bool,
    titles_prefix: str | None = None,
    query_in_block_prob: float = 0.1,
    one_sentence_documents: bool = False,
    report_progress: ReportProgress = no_progress,
) -> DatasetMaker:
    """Return the maker of datasets for the inverse cloze task.

    Args:
        titles_prefix: the corpus of the documents' titles.
        query_in_block_prob: share of queries that stay in their block.
        one_sentence_documents: use documents of one sentence.

    Raises:
        ConfigError: the tokenizer lacks special tokens, or one corpus of titles is given for
            several corpora of text.
    """
    if tokenizer is None:
        raise ValueError(f"{DatasetKind.ICT.value} are not made without a tokenizer")
    prefixes = named_prefixes(data)
    if titles_prefix is not None and len(prefixes) > 1:
        raise ConfigError(
            "titles are those of one corpus, and several are read",
            found=f"titles {titles_prefix}, corpora {' '.join(prefixes)}",
            fix="merge the corpora with tools/merge_datasets.py, and their titles alike",
        )
    open_corpus = corpus_opener(data, is_builder=is_builder, report_progress=report_progress)
    titles = None if titles_prefix is None else open_corpus(titles_prefix)
    recipe = ICTRecipe(
        vocabulary=MaskingVocabulary.of(tokenizer),
        seq_length=data.seq_length,
        seed=seed,
        query_in_block_prob=query_in_block_prob,
        one_sentence_documents=one_sentence_documents,
    )
    return Sentences(
        kind=DatasetKind.ICT,
        open_corpus=open_corpus,
        seed=seed,
        dataset=partial(ICTDataset, titles=titles, recipe=recipe),
    )


def check_seed(seed: int) -> None:
    """Raise ConfigError for a seed that sample orders cannot be drawn with."""
    if not 0 <= seed < 2**32:
        raise ConfigError(
            "the seed of the sample order is out of range",
            found=f"--seed {seed}",
            fix="use a seed from 0 to 4294967295",
        )
