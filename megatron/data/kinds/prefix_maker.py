"""The datasets of a prefix LM: windows with prefixes, or rows whose inputs are the prefixes."""

from dataclasses import dataclass

from megatron import log
from megatron.config.data import DataConfig
from megatron.data.corpus.verification_progress import ReportProgress, no_progress
from megatron.data.data_utils import Corpus, DatasetMaker, DocumentSlice
from megatron.data.kinds.dataset_kind import DatasetKind, prefix_dataset_kind
from megatron.data.kinds.dataset_makers import Vocabulary, gpt_maker
from megatron.data.orders.index_cache import IndexCache
from megatron.data.samples.prefix_dataset import PrefixDataset
from megatron.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixedWindows:
    """Windows of another maker, with prefixes; `eod` is that of `PrefixDataset`."""

    windows: DatasetMaker
    eod: int | None
    seed: int

    def open(self, prefix: str) -> Corpus:
        """Return a corpus of which each item is a document."""
        return self.windows.open(prefix)

    def make(
        self, corpus: Corpus, documents: DocumentSlice, *, num_samples: int, cache: IndexCache
    ) -> PrefixDataset:
        """Return the windows over `documents` with their prefixes."""
        windows = self.windows.make(corpus, documents, num_samples=num_samples, cache=cache)
        return PrefixDataset(windows, eod=self.eod, seed=self.seed)

    def epochs(self, dataset: PrefixDataset, samples: int) -> float | None:
        """Return passes over the documents that `samples` windows are."""
        return self.windows.epochs(dataset.dataset, samples)


def prefix_maker(
    data: DataConfig,
    *,
    tokenizer: Vocabulary | None,
    seed: int,
    is_builder: bool,
    report_progress: ReportProgress = no_progress,
) -> DatasetMaker:
    """Return the dataset maker of a prefix LM; windows with a prefix a row need no tokenizer.

    Raises:
        ConfigError: the tokenizer lacks tokens that the kind needs, or lengths do not work out.
    """
    made = gpt_maker(
        data,
        tokenizer=tokenizer,
        seed=seed,
        is_builder=is_builder,
        report_progress=report_progress,
    )
    if prefix_dataset_kind(data) is not DatasetKind.PREFIX:
        return made
    if not data.loss_on_targets_only:
        log.warning_once(
            "loss of prefixes",
            "the loss counts the tokens of prefixes, which the model sees before it predicts them; "
            "--loss-on-targets-only leaves them out",
        )
    eod = None
    if data.reset_attention_mask:
        eod = None if tokenizer is None else tokenizer.eod
        if eod is None:
            raise ConfigError(
                "documents cannot have prefixes of their own without an end-of-document token",
                found="--reset-attention-mask, and a tokenizer without one",
                fix="use a tokenizer with an end-of-document token, or leave the flag out for one "
                "prefix a row",
            )
    return PrefixedWindows(windows=made, eod=eod, seed=seed)
