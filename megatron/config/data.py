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


class DataIntegrity(StrEnum):
    """How much of a corpus is compared with the checksums that it was written with."""

    OFF = "off"  # nothing: lengths and the index have to be consistent, as always
    HEADER = "header"  # the index, when the corpus is opened
    TOUCHED = "touched"  # the index, and each block of tokens before its first use
    FULL = "full"  # everything, before training


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
    train_weighted_split_paths: tuple[str, ...] | None = flag(
        None, help='one "NAME: WEIGHT START:END PREFIX, ..." of shares of corpora for training'
    )
    valid_weighted_split_paths: tuple[str, ...] | None = flag(
        None, help="the same for validation: any number of groups, each evaluated under its NAME"
    )
    test_weighted_split_paths: tuple[str, ...] | None = flag(
        None, help="the same for test: any number of groups, each evaluated under its NAME"
    )
    train_weighted_split_paths_path: str | None = flag(
        None, help="file of one line that holds --train-weighted-split-paths, quotes included"
    )
    valid_weighted_split_paths_path: str | None = flag(
        None, help="file of one line that holds --valid-weighted-split-paths, quotes included"
    )
    test_weighted_split_paths_path: str | None = flag(
        None, help="file of one line that holds --test-weighted-split-paths, quotes included"
    )
    data_cache_path: str | None = flag(
        None, help="folder for index caches; when not set beside the data"
    )
    data_integrity: DataIntegrity = flag(
        DataIntegrity.TOUCHED,
        help="what is compared with the checksums of a corpus: off nothing, header the index, "
        "touched also each block of tokens before its first use, full everything before training",
    )
    mmap_bin_files: bool = flag(
        False,
        help="read tokens through a mapping: faster, but a file that is cut short during the run "
        "ends it with SIGBUS and no message",
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

    @property
    def has_weighted_splits(self) -> bool:
        """Whether the data is named by weighted ranges (Megatron-DeepSpeed's second mode)."""
        uses = ("train", "valid", "test")
        return any(given is not None for use in uses for given in self._weighted(use))

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
        yield from self._weighted_problems(
            any(path is not None for path in (self.data_path, *apart))
        )
        trained = (self.data_path, self.train_data_path, *self._weighted("train"))
        if all(path is None for path in trained):
            yield ConfigError(
                "no training data was given",
                found="neither --data-path nor --train-data-path nor --train-weighted-split-paths",
                fix="give the prefix that tools/preprocess_data.py printed, as --data-path PREFIX",
            )

    def _weighted(self, use: str) -> tuple[object, object]:
        """The two flags, of which at most one is given, that name groups for one use."""
        name = f"{use}_weighted_split_paths"
        return getattr(self, name), getattr(self, f"{name}_path")

    def _weighted_problems(self, has_other_paths: bool) -> Iterator[ConfigError]:
        if self.has_weighted_splits and has_other_paths:
            yield ConfigError(
                "the data was given twice, by weighted ranges and by whole paths",
                found="weighted-split-paths together with --data-path or a path for one split",
                fix="keep only --train-, --valid- and --test-weighted-split-paths, or none of them",
            )
        for use in ("train", "valid", "test"):
            if None not in self._weighted(use):
                flag_of_use = f"--{use}-weighted-split-paths"
                yield ConfigError(
                    "weighted ranges were given twice, on the command line and in a file",
                    found=f"{flag_of_use} together with {flag_of_use}-path",
                    fix="keep one of the two",
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
