"""The corpora of a run for its checks: each opened once, however many checks use it.

A corpus that cannot be opened is remembered with its error. What a reader would get wrong: nothing
here reads tokens, so the checksums of blocks are left to the datasets, which open anew.
"""

from collections.abc import Callable, Iterator
from functools import partial

from megatron.config.data import DataConfig, DataIntegrity
from megatron.data.data_utils import Corpus, named_prefixes
from megatron.data.indexed_dataset import MMapIndexedDataset
from megatron.data.kinds.dataset_kind import open_of_kind
from megatron.data.kinds.program_data import KindOfData
from megatron.errors import ConfigError, MegatronError


class CorporaOnce:
    """The corpora of a run by prefix, each opened once."""

    def __init__(self, kind: KindOfData, opener: Callable[[str], Corpus] | None = None) -> None:
        self._kind, self._opener = kind, opener
        self._found: dict[str, Corpus | MegatronError] = {}

    def find(self, data: DataConfig, prefix: str) -> Corpus | MegatronError:
        """Return the corpus `prefix` opened by the run's flags, or the error of opening it."""
        if prefix not in self._found:
            header = data.data_integrity is not DataIntegrity.OFF
            open_corpus = partial(
                MMapIndexedDataset,
                integrity=DataIntegrity.HEADER if header else DataIntegrity.OFF,
                mapped=data.mmap_bin_files,
            )
            try:
                self._found[prefix] = (
                    open_of_kind(self._kind(data), prefix, open_corpus)
                    if self._opener is None
                    else self._opener(prefix)
                )
            except MegatronError as error:
                self._found[prefix] = error
        return self._found[prefix]

    def opened(self, data: DataConfig) -> Iterator[Corpus]:
        """Yield every corpus of the run that can be opened; another check reports the others."""
        try:
            prefixes = named_prefixes(data)
        except ConfigError:
            return
        for prefix in prefixes:
            corpus = self.find(data, prefix)
            if not isinstance(corpus, MegatronError):
                yield corpus
