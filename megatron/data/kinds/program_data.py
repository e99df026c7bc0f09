"""What each program reads: which kind of dataset its flags ask for, and who makes it.

Programs, their checks before training and the loop all take the same value, so that they cannot
disagree about what a flag means.
"""

from typing import NamedTuple, Protocol

from megatron.config.data import DataConfig
from megatron.data.corpus.verification_progress import Beat, unheard
from megatron.data.data_utils import DatasetMaker
from megatron.data.kinds.dataset_kind import DatasetKind, bert_dataset_kind, dataset_kind
from megatron.data.kinds.dataset_makers import Vocabulary, bert_maker, gpt_maker


class Kind(Protocol):
    """Chooses a kind by the flags; ConfigError for flags that would do nothing."""

    def __call__(self, data: DataConfig) -> DatasetKind:
        """The kind of every dataset of the run."""


class Maker(Protocol):
    """Makes the datasets of that kind; ConfigError where the tokenizer lacks what they need."""

    def __call__(
        self,
        data: DataConfig,
        *,
        tokenizer: Vocabulary | None,
        seed: int,
        is_builder: bool,
        beat: Beat = unheard,
    ) -> DatasetMaker:
        """The maker for one run; without a tokenizer only what needs none."""


class ProgramData(NamedTuple):
    """What a program reads."""

    kind: Kind
    maker: Maker


GPT_DATA = ProgramData(dataset_kind, gpt_maker)
BERT_DATA = ProgramData(bert_dataset_kind, bert_maker)
