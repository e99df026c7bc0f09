"""DataConfig and TokenizerConfig: which tokens are read, in which order, by which vocabulary."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from megatron.config.fields import check_field, flag, raise_all
from megatron.errors import ConfigError


class DataLoaderKind(StrEnum):
    """Order in which a dataset is walked."""

    SINGLE = "single"
    CYCLIC = "cyclic"


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """Which tokens are read, and in which order."""

    seq_length: int = flag(help="tokens per sample", aliases=("--encoder-seq-length",))
    data_path: tuple[str, ...] | None = flag(
        None, help="PREFIX, or WEIGHT PREFIX pairs, of .bin/.idx files; --split divides them"
    )
    split: str = flag("969, 30, 1", help="shares of train, validation and test in --data-path")
    train_data_path: tuple[str, ...] | None = flag(
        None, help="prefixes for training only, used whole"
    )
    valid_data_path: tuple[str, ...] | None = flag(
        None, help="prefixes for validation only, used whole"
    )
    test_data_path: tuple[str, ...] | None = flag(None, help="prefixes for test only, used whole")
    data_cache_path: str | None = flag(
        None, help="folder for index caches; when not set beside the data"
    )
    num_workers: int = flag(2, help="processes per rank that read ahead; 0 reads in the loop")
    dataloader_type: DataLoaderKind = flag(
        DataLoaderKind.SINGLE, help="single walks the index in order, cyclic shuffles each epoch"
    )
    reset_position_ids: bool = flag(False, help="start positions again after an end of document")
    reset_attention_mask: bool = flag(False, help="do not attend across an end of document")
    eod_mask_loss: bool = flag(False, help="do not count the loss of end-of-document tokens")
    last_epoch_cutoff: float = flag(
        0.95,
        help="share of the last epoch below which it is shuffled apart: 0.95 as in "
        "Megatron-DeepSpeed, 0.80 as in Megatron-LM",
    )

    def __post_init__(self) -> None:
        raise_all(self._problems())

    def _problems(self) -> Iterator[ConfigError]:
        yield from check_field(
            self.seq_length > 0,
            "seq_length",
            self.seq_length,
            problem="a size is not positive",
            fix="use a whole number above 0",
        )
        yield from check_field(
            self.num_workers >= 0,
            "num_workers",
            self.num_workers,
            problem="it cannot be negative",
            fix="use 0 or more",
        )
        yield from check_field(
            0 <= self.last_epoch_cutoff <= 1,
            "last_epoch_cutoff",
            self.last_epoch_cutoff,
            problem="a share is outside [0, 1]",
            fix="use 0.95 or 0.80",
        )
        apart = (self.train_data_path, self.valid_data_path, self.test_data_path)
        if self.data_path is not None and any(path is not None for path in apart):
            yield ConfigError(
                "the data was given twice, with a split and by separate files",
                found="--data-path together with --train-, --valid- or --test-data-path",
                fix="keep --data-path with --split, or the separate ones",
            )
        if self.data_path is None and self.train_data_path is None:
            yield ConfigError(
                "no training data was given",
                found="neither --data-path nor --train-data-path",
                fix="give the prefix that tools/preprocess_data.py printed, as --data-path PREFIX",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerConfig:
    """Which vocabulary the tokens are of."""

    tokenizer_type: str | None = flag(
        None,
        help="GPT2BPETokenizer, HFTokenizer, PretrainedFromHF, SentencePieceTokenizer, "
        "BertWordPieceLowerCase, BertWordPieceCase, NullTokenizer or ByteTokenizer",
    )
    vocab_file: str | None = flag(None, help="vocab.json of a BPE, vocab.txt of a WordPiece")
    merge_file: str | None = flag(None, help="merges.txt of a BPE")
    tokenizer_model: str | None = flag(None, help="model file of SentencePiece, or tokenizer.json")
    tokenizer_name_or_path: str | None = flag(
        None, help="folder or tokenizer.json for HFTokenizer and PretrainedFromHF"
    )
    vocab_size: int | None = flag(None, help="vocabulary of NullTokenizer, without its eod")
    vocab_extra_ids: int = flag(0, help="extra sentinel tokens added to the vocabulary")
    make_vocab_size_divisible_by: int = flag(
        128, help="pad the vocabulary to a multiple of this x tensor-model-parallel-size"
    )
    pad_vocab_size_to: int | None = flag(None, help="pad the vocabulary to exactly this size")

    def __post_init__(self) -> None:
        raise_all(self._problems())

    def _problems(self) -> Iterator[ConfigError]:
        if self.tokenizer_type is None:
            yield ConfigError(
                "no tokenizer was named, so the vocabulary is unknown",
                found="no --tokenizer-type",
                fix="give the --tokenizer-type that the data was preprocessed with",
            )
        yield from check_field(
            self.make_vocab_size_divisible_by > 0,
            "make_vocab_size_divisible_by",
            self.make_vocab_size_divisible_by,
            problem="a size is not positive",
            fix="use 1 for no padding, or 128",
        )
        for name, least in (("vocab_size", 1), ("pad_vocab_size_to", 1), ("vocab_extra_ids", 0)):
            value = getattr(self, name)
            yield from check_field(
                value is None or value >= least,
                name,
                value,
                problem=f"it is below {least}",
                fix=f"use {least} or more",
            )
