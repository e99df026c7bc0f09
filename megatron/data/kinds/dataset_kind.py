"""Selects the kind of dataset of a run by its flags, and opens a prefix as that kind.

The only module that maps flags to a kind: builder, batch function and preflight use it. What a
reader would get wrong: dialogues and pairs are two corpora under one prefix, and what a split is a
range of (items, documents of sentences, pairs) differs from kind to kind.
"""

from collections.abc import Iterable, Iterator
from enum import StrEnum

from megatron.config.data import DataConfig
from megatron.config.fields import default_of, flag_name
from megatron.data.corpus.metadata import ItemLevel
from megatron.data.corpus.paths import both_files_exist
from megatron.data.data_utils import Corpus, OpenCorpus
from megatron.data.samples.mtf_dataset import PARTS as PAIR_PARTS
from megatron.data.samples.mtf_dataset import MTFDataset
from megatron.data.samples.sft_dataset import PARTS as DIALOGUE_PARTS
from megatron.data.samples.sft_dataset import SFTCorpus, part_prefix
from megatron.errors import ConfigError, DataError


class DatasetKind(StrEnum):
    """What samples are made of."""

    GPT = "windows of text"
    FIM = "windows of text with middles to fill in"
    MLM = "windows of text with spans to write"
    MOCK = "made-up windows"
    PREFIX = "windows of text with prefixes"
    SFT = "rows of dialogues"
    MTF = "rows of pairs"
    PAIRS = "pairs, a row of each stack"
    BERT = "two segments with words to guess"
    T5 = "text with spans to write"
    ICT = "sentences and the blocks that they are from"
    IMAGES = "images"

    @property
    def is_packed(self) -> bool:
        """Whether whole documents share a row, so that none may attend to another."""
        return self in (DatasetKind.SFT, DatasetKind.MTF)

    @property
    def can_be_cut(self) -> bool:
        """Whether the beginning of a row is a sample too: in other kinds the targets come last."""
        return self in (DatasetKind.GPT, DatasetKind.FIM, DatasetKind.MOCK)

    @property
    def num_towers(self) -> int:
        """How many stacks of --num-layers there are, each of which reads a row of a sample."""
        return 2 if self is DatasetKind.ICT else 1

    @property
    def level(self) -> ItemLevel:
        """The level of the items of its corpora, as in their sidecars."""
        sentences = (DatasetKind.BERT, DatasetKind.T5, DatasetKind.ICT)
        return ItemLevel.SENTENCE if self in sentences else ItemLevel.DOCUMENT


def dataset_kind(data: DataConfig) -> DatasetKind:
    """Return the kind of dataset that the flags of a GPT program select."""
    if data.sft:
        return DatasetKind.SFT
    if data.mtf:
        return DatasetKind.MTF
    if data.fim_data:
        return DatasetKind.FIM
    if data.mock_data:
        return DatasetKind.MOCK
    return DatasetKind.GPT if data.noise_density is None else DatasetKind.MLM


def prefix_dataset_kind(data: DataConfig) -> DatasetKind:
    """Return the kind of dataset that the flags of a program for prefix LMs select."""
    kind = dataset_kind(data)
    has_inputs = kind in (DatasetKind.MTF, DatasetKind.MLM)
    return kind if has_inputs or kind in _WITHOUT_PREFIX else DatasetKind.PREFIX


def pairs_dataset_kind(data: DataConfig) -> DatasetKind:
    """Return the kind of dataset that a program for pairs reads, whatever its flags are."""
    del data
    return DatasetKind.MTF


def bert_dataset_kind(data: DataConfig) -> DatasetKind:
    """Return the kind of dataset that a program for BERT reads, whatever its flags are."""
    del data
    return DatasetKind.BERT


def ict_dataset_kind(data: DataConfig) -> DatasetKind:
    """Return the kind of dataset that a program for retrievers reads, whatever its flags are."""
    del data
    return DatasetKind.ICT


def t5_dataset_kind(data: DataConfig) -> DatasetKind:
    """Return the kind of dataset that the flags of a program for T5 select."""
    if data.mtf:
        return DatasetKind.PAIRS
    return DatasetKind.T5 if data.noise_density is None else DatasetKind.MLM


def flags_unread_by_gpt(data: DataConfig) -> Iterator[ConfigError]:
    """Yield an error for each flag that only datasets of sentences read, if it was given."""
    for name, shown in _given(data, _SENTENCE_FIELDS):
        yield ConfigError(
            "a flag was given that has no effect on the data of a GPT",
            found=shown,
            fix=f"leave {name} out; it is for BERT",
        )
    if data.loss_on_targets_only and not dataset_kind(data).is_packed:
        yield ConfigError(
            "a loss on targets only needs data that have targets",
            found="--loss-on-targets-only without --mtf or --sft",
            fix="leave it out, or add --mtf for pairs of inputs and targets, --sft for dialogues; "
            "pretrain_prefix_lm.py has targets behind prefixes",
        )
    if data.reweight_loss_based_on_position_frequency:
        yield ConfigError(
            "positions are weighted by how often they are behind a prefix, and there is none",
            found=_REWEIGHT,
            fix=f"leave {_REWEIGHT} out, or use pretrain_prefix_lm.py",
        )


def flags_unread_by_prefix_lm(data: DataConfig) -> Iterator[ConfigError]:
    """Yield an error for each flag that datasets with prefixes do not read, if it was given."""
    for name, shown in _given(data, _SENTENCE_FIELDS):
        yield ConfigError(
            "a flag was given that has no effect on the data of a prefix LM",
            found=shown,
            fix=f"leave {name} out; it is for BERT",
        )
    kind = prefix_dataset_kind(data)
    if kind in _WITHOUT_PREFIX:
        yield ConfigError(
            f"{kind.value} have no prefix that what follows could see",
            found=_WITHOUT_PREFIX[kind],
            fix=f"leave {_WITHOUT_PREFIX[kind]} out, or use pretrain_gpt.py; --mtf has pairs of "
            "inputs and targets",
        )
    if kind is not DatasetKind.PREFIX and data.reweight_loss_based_on_position_frequency:
        yield ConfigError(
            "positions are weighted by how often they are behind a prefix of random length",
            found=f"{_REWEIGHT}, and the data are {kind.value}",
            fix=f"leave {_REWEIGHT} out",
        )


def flags_unread_by_pairs(data: DataConfig) -> Iterator[ConfigError]:
    """Yield an error for each flag that a program for pairs does not read, if it was given."""
    yield from flags_unread_by_prefix_lm(data)
    kind = dataset_kind(data)
    if kind is not DatasetKind.MTF:
        yield ConfigError(
            "this program trains on pairs of inputs and targets",
            found=f"flags for {kind.value}",
            fix="leave them out, or use pretrain_prefix_lm.py",
        )


def flags_unread_by_bert(data: DataConfig) -> Iterator[ConfigError]:
    """Yield an error for each flag that only other datasets than BERT's read, if it was given."""
    for name, shown in _given(data, _NOT_FOR_BERT):
        yield ConfigError(
            "a flag was given that has no effect on the data of a BERT",
            found=shown,
            fix=f"leave {name} out",
        )


def flags_unread_by_ict(data: DataConfig) -> Iterator[ConfigError]:
    """Yield an error for each flag that only other datasets than a retriever's read, if given."""
    for name, shown in _given(data, (*_NOT_FOR_BERT, *_SENTENCE_FIELDS)):
        yield ConfigError(
            "a flag was given that has no effect on the data of a retriever",
            found=shown,
            fix=f"leave {name} out",
        )


def flags_unread_by_t5(data: DataConfig) -> Iterator[ConfigError]:
    """Yield an error for each flag that the datasets of a T5 do not read, if it was given."""
    of_sentences = () if t5_dataset_kind(data) is DatasetKind.T5 else _MASKING_FIELDS
    for name, shown in _given(data, (*_NOT_FOR_T5, *of_sentences)):
        yield ConfigError(
            "a flag was given that has no effect on the data of a T5",
            found=shown,
            fix=f"leave {name} out",
        )


def flags_unread_by_images(data: DataConfig) -> Iterator[ConfigError]:
    """Yield an error for each flag that only datasets of text read, if it was given."""
    for name, shown in _given(data, (*_NOT_FOR_BERT, *_SENTENCE_FIELDS)):
        yield ConfigError(
            "a flag was given that has no effect on images",
            found=shown,
            fix=f"leave {name} out",
        )


def _given(data: DataConfig, fields: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield the flag of each field whose value is not the default, alone and with that value."""
    for field in fields:
        value = getattr(data, field)
        if value != default_of(DataConfig, field):
            yield flag_name(field), f"{flag_name(field)} {value}"


_REWEIGHT = flag_name("reweight_loss_based_on_position_frequency")
# Kinds that a prefix LM does not take, by the flags that select them.
_WITHOUT_PREFIX = {DatasetKind.SFT: "--sft", DatasetKind.FIM: "--fim-data"}
# Fields that are read by other programs than those that train a GPT.
_MASKING_FIELDS = ("mask_prob", "short_seq_prob")
_SENTENCE_FIELDS = (*_MASKING_FIELDS, "bert_binary_head")
_DECODER_FIELDS = (
    "sft",
    "mtf",
    "fim_data",
    "mock_data",
    "reset_position_ids",
    "reset_attention_mask",
    "eod_mask_loss",
    "loss_on_targets_only",
    "reweight_loss_based_on_position_frequency",
)
_NOT_FOR_BERT = ("noise_density", *_DECODER_FIELDS)
_NOT_FOR_T5 = ("bert_binary_head", *(name for name in _DECODER_FIELDS if name != "mtf"))


def open_of_kind(kind: DatasetKind, prefix: str, open_corpus: OpenCorpus) -> Corpus:
    """Open `prefix` for datasets of `kind`; raises DataError for a corpus of another kind."""
    if kind.is_packed or kind is DatasetKind.PAIRS:
        return _open_parts(kind, prefix, open_corpus)
    indexed = open_corpus(prefix)
    level = kind.level
    of_sentences = level is ItemLevel.SENTENCE
    if indexed.metadata is not None and indexed.metadata.level != level:
        raise DataError(
            f"the corpus {prefix} is {_SPLIT[indexed.metadata.level]}, and {kind.value} are read "
            f"from one that is {_SPLIT[level]}",
            found=f'level "{indexed.metadata.level}" in its sidecar',
            fix=f"preprocess it {'with' if of_sentences else 'without'} --split-sentences",
        )
    count = len(indexed.doc_idx) - 1 if of_sentences else len(indexed)
    return Corpus(prefix, indexed, count, (indexed,), indexed.sizes)


_SPLIT = {
    ItemLevel.SENTENCE: "split into sentences",
    ItemLevel.DOCUMENT: "not split into sentences",
}


def _open_parts(kind: DatasetKind, prefix: str, open_corpus: OpenCorpus) -> Corpus:
    """Return the two corpora of dialogues or pairs; all except masks hold tokens."""
    if kind is DatasetKind.SFT:
        _refuse_other_prefixes(prefix, "--sft", DIALOGUE_PARTS, "tools/preprocess_sft.py")
        dialogues = SFTCorpus(prefix, open_corpus=open_corpus)
        return Corpus(prefix, dialogues, len(dialogues), (dialogues.tokens,), dialogues.lengths)
    maker = "tools/preprocess_data.py --json-keys inputs targets"
    _refuse_other_prefixes(prefix, "--mtf", PAIR_PARTS, maker)
    pairs = MTFDataset(prefix, open_corpus=open_corpus)
    return Corpus(prefix, pairs, len(pairs), (pairs.inputs, pairs.targets), pairs.lengths)


def _refuse_other_prefixes(prefix: str, flag: str, parts: tuple[str, str], maker: str) -> None:
    """Raise DataError if the prefix is not the one that both corpora share."""
    names = [part_prefix(prefix, part) for part in parts]
    if any(both_files_exist(name) for name in names) or not both_files_exist(prefix):
        return  # opening the pair reports what is missing
    shared = next(
        (
            prefix.removesuffix(ending)
            for ending in (f"_{part}_document" for part in parts)
            if prefix.endswith(ending)
        ),
        None,
    )
    raise DataError(
        f"{flag} reads two corpora of one prefix, and this names a single one",
        found=f"{prefix}, and no {names[0]} or {names[1]}",
        fix=f"leave the ending out: {shared}"
        if shared is not None
        else f"name the --output-prefix of {maker}, or leave {flag} out",
    )
