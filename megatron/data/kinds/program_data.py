"""The data of each program: the kind of dataset that its flags select, and its maker.

Programs, their checks before training and the loop all use the same value, so that a flag has one
meaning.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple, Protocol

from megatron.config.data import DataConfig
from megatron.config.models.retrieval import RetrievalConfig
from megatron.data.corpus.verification_progress import ReportProgress, no_progress
from megatron.data.data_utils import Corpus, DatasetMaker
from megatron.data.kinds.dataset_kind import (
    DatasetKind,
    bert_dataset_kind,
    dataset_kind,
    flags_unread_by_bert,
    flags_unread_by_gpt,
    flags_unread_by_ict,
    flags_unread_by_pairs,
    flags_unread_by_prefix_lm,
    ict_dataset_kind,
    pairs_dataset_kind,
    prefix_dataset_kind,
)
from megatron.data.kinds.dataset_makers import Vocabulary, bert_maker, gpt_maker, ict_maker
from megatron.data.kinds.prefix_maker import prefix_maker
from megatron.data.samples.mlm_dataset import SpanLengths, span_lengths
from megatron.errors import ConfigError


class KindOfData(Protocol):
    """Chooses a kind by the flags, whether or not all of them are read."""

    def __call__(self, data: DataConfig) -> DatasetKind:
        """Return the kind of every dataset of the run."""


class MakerOfData(Protocol):
    """Makes the datasets of that kind; ConfigError where the tokenizer lacks what they need."""

    def __call__(
        self,
        data: DataConfig,
        *,
        tokenizer: Vocabulary | None,
        seed: int,
        is_builder: bool,
        report_progress: ReportProgress = no_progress,
    ) -> DatasetMaker:
        """Return the maker for one run; without a tokenizer only what needs none."""


def span_lengths_of_sequence(data: DataConfig) -> SpanLengths:
    """Return the lengths with which inputs and targets are one sequence; ConfigError without."""
    return span_lengths(
        data.seq_length,
        noise_density=0.15 if data.noise_density is None else data.noise_density,
        mean_noise_span_length=data.mean_noise_span_length,
    )


class ProgramData(NamedTuple):
    """The data of a program.

    Attributes:
        unread_flags: yields an error for each flag without effect.
        spans: the lengths of windows that lose spans, which fill its sequence length.
        has_decoder: the model has a decoder beside its encoder, with flags and rows of its own.
        open: opens what is no corpus of tokens; None: `open_of_kind` does.
    """

    kind: KindOfData
    maker: MakerOfData
    unread_flags: Callable[[DataConfig], Iterator[ConfigError]]
    spans: Callable[[DataConfig], SpanLengths] = span_lengths_of_sequence
    has_decoder: bool = False
    open: Callable[[str], Corpus] | None = None


GPT_DATA = ProgramData(dataset_kind, gpt_maker, flags_unread_by_gpt)
PREFIX_DATA = ProgramData(prefix_dataset_kind, prefix_maker, flags_unread_by_prefix_lm)
PAIRS_DATA = ProgramData(pairs_dataset_kind, gpt_maker, flags_unread_by_pairs)
BERT_DATA = ProgramData(bert_dataset_kind, bert_maker, flags_unread_by_bert)


def ict_data(retrieval: RetrievalConfig) -> ProgramData:
    """Return the data of a retriever, whose blocks and questions its own flags decide."""
    maker = partial(
        ict_maker,
        titles_prefix=retrieval.titles_data_path,
        query_in_block_prob=retrieval.query_in_block_prob,
        one_sentence_documents=retrieval.use_one_sent_docs,
    )
    return ProgramData(ict_dataset_kind, maker, flags_unread_by_ict)
