"""DataConfig and TokenizerConfig: which tokens are read, in which order, by which vocabulary."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from megatron.config.fields import check_field, default_of, flag, flag_name, raise_all
from megatron.errors import ConfigError


class DataLoaderKind(StrEnum):
    """Order in which a dataset is walked."""

    SINGLE = "single"
    CYCLIC = "cyclic"


class DataIntegrity(StrEnum):
    """How much of a corpus is compared with the checksums that it was written with."""

    OFF = "off"  # nothing; lengths and the index must be consistent in any case
    HEADER = "header"  # the index, when the corpus is opened
    TOUCHED = "touched"  # the index, and each block of tokens before its first use
    FULL = "full"  # everything, before training


class OnTooLong(StrEnum):
    """What is done with a document that is longer than a row."""

    ERROR = "error"
    SKIP = "skip"
    CUT = "cut"  # its beginning is kept


# Flags that select another kind of dataset than windows of text, and the flags of that kind.
_KINDS = {
    "fim_data": (
        "fim_rate",
        "fim_spm_rate",
        "fim_prefix_token",
        "fim_middle_token",
        "fim_suffix_token",
    ),
    "sft": ("on_too_long_document",),
    "mtf": ("on_too_long_document",),
    "noise_density": ("mean_noise_span_length",),
    "mock_data": (),
}
_SHARES = (
    "last_epoch_cutoff",
    "fim_rate",
    "fim_spm_rate",
    "mask_prob",
    "short_seq_prob",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """Which tokens are read, and in which order."""

    seq_length: int = flag(help="tokens per sample", aliases=("--encoder-seq-length",))
    data_path: tuple[str, ...] | None = flag(
        None, help="PREFIX, or WEIGHT PREFIX pairs, of .bin/.idx files; --split divides them"
    )
    split: str = flag(
        "969, 30, 1", help="shares of train, validation and test in --data-path; 0: no such data"
    )
    mock_data: bool = flag(
        False,
        help="make samples up, of documents that count from 1, for trials without a corpus; "
        "--split says which of train, validation and test there are",
    )
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
    loss_on_targets_only: bool = flag(
        False, help="count the loss of tokens behind the prefixes of a prefix LM alone"
    )
    reweight_loss_based_on_position_frequency: bool = flag(
        False,
        help="weigh the loss of position t of s by 2 (s - t) / (s + 1), as late positions are "
        "behind a prefix more often than early ones",
    )
    last_epoch_cutoff: float = flag(
        0.95,
        help="share of the last epoch below which it is shuffled apart: 0.95 as in "
        "Megatron-DeepSpeed, 0.80 as in Megatron-LM",
    )
    fim_data: bool = flag(
        False, help="rearrange documents so that the model learns to fill in their middle"
    )
    fim_rate: float = flag(0.5, help="share of the documents that --fim-data rearranges")
    fim_spm_rate: float = flag(0.5, help="share of these that are written with the suffix first")
    fim_prefix_token: str = flag("<fim_prefix>", help="token that stands before a prefix")
    fim_middle_token: str = flag("<fim_middle>", help="token that stands before a middle")
    fim_suffix_token: str = flag("<fim_suffix>", help="token that stands before a suffix")
    sft: bool = flag(
        False,
        help="finetune on dialogues packed into rows, learning the answers: --data-path names "
        "what tools/preprocess_sft.py wrote",
    )
    mtf: bool = flag(
        False,
        help="finetune on pairs packed into rows, learning the targets, or by pretrain_t5.py one a "
        "row: --data-path names P of P_inputs_document and P_targets_document",
    )
    on_too_long_document: OnTooLong | None = flag(
        None,
        help="what becomes of a dialogue or pair longer than --seq-length: error, skip or cut; "
        "when not set error with --sft and skip with --mtf",
    )
    noise_density: float | None = flag(
        None, help="learn to write the spans, this share of the tokens, that a text has lost"
    )
    mean_noise_span_length: float = flag(
        3.0, help="mean number of tokens in a span of --noise-density"
    )
    mask_prob: float = flag(0.15, help="BERT: share of the tokens to predict")
    short_seq_prob: float = flag(0.1, help="BERT: share of samples that are cut shorter")
    bert_binary_head: bool = flag(
        True,
        help="BERT: samples of two segments, whose order is guessed",
        off=("--bert-no-binary-head",),
    )

    def __post_init__(self) -> None:
        raise_all(self._problems())

    @property
    def has_weighted_splits(self) -> bool:
        """Whether the data is named by weighted ranges (Megatron-DeepSpeed's second mode)."""
        uses = ("train", "valid", "test")
        return any(given is not None for use in uses for given in self._weighted(use))

    @property
    def is_split(self) -> bool:
        """Whether --split divides the data, so that a share of 0 means no such data."""
        return self.data_path is not None or self.mock_data

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
        for name in _SHARES:
            yield from check_field(
                0 <= getattr(self, name) <= 1,
                name,
                getattr(self, name),
                problem="a share is outside [0, 1]",
                fix=f"use a number from 0 to 1, as {default_of(DataConfig, name)}",
            )
        yield from self._kind_problems()
        apart = (self.train_data_path, self.valid_data_path, self.test_data_path)
        if self.data_path is not None and any(path is not None for path in apart):
            yield ConfigError(
                "the data was given twice, with a split and by separate files",
                found="--data-path together with --train-, --valid- or --test-data-path",
                fix="keep --data-path with --split, or the separate ones",
            )
        has_paths = any(path is not None for path in (self.data_path, *apart))
        yield from self._weighted_problems(has_paths)
        if self.mock_data and (has_paths or self.has_weighted_splits):
            yield ConfigError(
                "the data was given twice, by paths and as made-up samples",
                found="--mock-data together with paths of corpora",
                fix="leave --mock-data out to train on the corpora, or leave the paths out",
            )
        trained = (self.data_path, self.train_data_path, *self._weighted("train"))
        if all(path is None for path in trained) and not self.mock_data:
            yield ConfigError(
                "no training data was given",
                found="neither --data-path nor --train-data-path nor --train-weighted-split-paths",
                fix="give the prefix that tools/preprocess_data.py printed, as --data-path "
                "PREFIX, or try the run with --mock-data",
            )

    def _kind_problems(self) -> Iterator[ConfigError]:
        """Yield an error for two kinds at once, and for flags of a kind that is not selected."""
        asked = [name for name in _KINDS if getattr(self, name) not in (False, None)]
        if len(asked) > 1:
            flags = [flag_name(name) for name in asked]
            yield ConfigError(
                "two kinds of training data were given at once",
                found=" together with ".join(flags),
                fix=f"keep one of {' and '.join(flags)}; runs of different kinds follow each "
                "other with --load",
            )
        for name in dict.fromkeys(name for names in _KINDS.values() for name in names):
            owners = [kind for kind, names in _KINDS.items() if name in names]
            if self._differs(name) and not set(owners) & set(asked):
                needed = " or ".join(flag_name(owner) for owner in owners)
                yield ConfigError(
                    "a flag was given that only has a meaning beside another",
                    found=f"{flag_name(name)} {getattr(self, name)} without {needed}",
                    fix=f"add {needed}, or leave {flag_name(name)} out",
                )
        borders = ("reset_position_ids", "reset_attention_mask", "eod_mask_loss")
        inside = [flag_name(name) for name in borders if getattr(self, name)]
        if self.noise_density is not None and inside:
            yield ConfigError(
                "a text that has lost spans is one document, whatever ends in it",
                found=f"--noise-density {self.noise_density} with {', '.join(inside)}",
                fix=f"leave {', '.join(inside)} out",
            )
        if self.mtf and self.on_too_long_document is OnTooLong.CUT:
            yield ConfigError(
                "a pair that is cut loses its target, which is what is learned",
                found="--mtf with --on-too-long-document cut",
                fix="use --on-too-long-document skip or error, or a larger --seq-length",
            )

    def _differs(self, name: str) -> bool:
        return bool(getattr(self, name) != default_of(DataConfig, name))

    def _weighted(self, use: str) -> tuple[object, object]:
        """Return the two flags, of which at most one is given, that name groups for one use."""
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
        "BertWordPieceLowerCase, BertWordPieceCase, TikTokenizer, NullTokenizer or ByteTokenizer",
    )
    vocab_file: str | None = flag(None, help="vocab.json of a BPE, vocab.txt of a WordPiece")
    merge_file: str | None = flag(None, help="merges.txt of a BPE")
    tokenizer_model: str | None = flag(
        None, help="model file of SentencePiece, tokenizer.json, or the .json of TikTokenizer"
    )
    tokenizer_name_or_path: str | None = flag(
        None, help="folder or tokenizer.json for HFTokenizer and PretrainedFromHF"
    )
    vocab_size: int | None = flag(
        None, help="vocabulary of NullTokenizer, without its eod; all tokens of TikTokenizer"
    )
    tiktoken_pattern: str | None = flag(None, help="TikTokenizer: v1 or v2, how text is split")
    tiktoken_num_special_tokens: int = flag(
        1000, help="TikTokenizer: special tokens, which come first"
    )
    true_vocab_size: int | None = flag(
        None,
        help="rows of the vocabulary that belong to the model where they are more than the "
        "tokenizer has tokens, as in Pythia and Qwen",
    )
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
        for name, least in (
            ("vocab_size", 1),
            ("true_vocab_size", 1),
            ("pad_vocab_size_to", 1),
            ("vocab_extra_ids", 0),
        ):
            value = getattr(self, name)
            yield from check_field(
                value is None or value >= least,
                name,
                value,
                problem=f"it is below {least}",
                fix=f"use {least} or more",
            )
