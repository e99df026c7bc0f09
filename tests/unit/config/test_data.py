"""Which tokens are read and by which vocabulary: what is refused."""

from itertools import combinations
from typing import Any

import pytest

from megatron.config.data import DataConfig, DataLoaderKind, OnTooLong
from megatron.errors import ConfigError
from tests.unit.config.groups import a_tokenizer, some_data


def test_the_order_is_single_unless_said_otherwise() -> None:
    assert some_data().dataloader_type is DataLoaderKind.SINGLE


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seq_length": 0}, "a size is not positive\n  found: --seq-length 0"),
        ({"num_workers": -1}, "it cannot be negative\n  found: --num-workers -1"),
        ({"last_epoch_cutoff": 1.5}, r"a share is outside \[0, 1\]\n  found: --last-epoch-cutoff"),
        (
            {"fim_data": True, "fim_rate": -1},
            r"a share is outside \[0, 1\]\n  found: --fim-rate -1",
        ),
        ({"mask_prob": 2}, r"a share is outside \[0, 1\]\n  found: --mask-prob 2"),
    ],
)
def test_numbers_out_of_range_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        some_data(**changes)


KINDS = {
    "fim_data": ("--fim-data", True),
    "sft": ("--sft", True),
    "mtf": ("--mtf", True),
    "noise_density": ("--noise-density", 0.15),
}


@pytest.mark.parametrize("pair", list(combinations(KINDS, 2)), ids="+".join)
def test_a_run_reads_one_kind_of_data(pair: tuple[str, str]) -> None:
    some_data(**{pair[0]: KINDS[pair[0]][1]})
    with pytest.raises(ConfigError, match="two kinds of training data") as caught:
        some_data(**{name: KINDS[name][1] for name in pair})
    assert caught.value.found == " together with ".join(KINDS[name][0] for name in pair)


@pytest.mark.parametrize(
    ("flags", "found"),
    [
        ({"fim_rate": 0.9}, "--fim-rate 0.9 without --fim-data"),
        ({"fim_spm_rate": 0.0}, "--fim-spm-rate 0.0 without --fim-data"),
        ({"sft": True, "fim_prefix_token": "<p>"}, "--fim-prefix-token <p> without --fim-data"),
        ({"fim_middle_token": "<m>"}, "--fim-middle-token <m> without --fim-data"),
        ({"fim_suffix_token": "<s>"}, "--fim-suffix-token <s> without --fim-data"),
        (
            {"on_too_long_document": OnTooLong.SKIP},
            "--on-too-long-document skip without --sft or --mtf",
        ),
        (
            {"mean_noise_span_length": 2.0},
            "--mean-noise-span-length 2.0 without --noise-density",
        ),
    ],
)
def test_a_flag_of_a_kind_that_was_not_asked_for_is_refused(
    flags: dict[str, Any], found: str
) -> None:
    with pytest.raises(ConfigError, match="only has a meaning beside another") as caught:
        some_data(**flags)
    assert caught.value.found == found


@pytest.mark.parametrize("name", ["reset_position_ids", "reset_attention_mask", "eod_mask_loss"])
def test_lost_spans_know_no_ends_of_documents(name: str) -> None:
    with pytest.raises(ConfigError, match="is one document, whatever ends in it") as caught:
        some_data(noise_density=0.15, **{name: True})
    assert caught.value.found == f"--noise-density 0.15 with --{name.replace('_', '-')}"


def test_a_pair_is_never_cut() -> None:
    some_data(sft=True, on_too_long_document=OnTooLong.CUT)
    with pytest.raises(ConfigError, match="a pair that is cut loses its target"):
        some_data(mtf=True, on_too_long_document=OnTooLong.CUT)


@pytest.mark.parametrize("name", ["train_data_path", "valid_data_path", "test_data_path"])
def test_data_is_split_or_separate_but_not_both(name: str) -> None:
    with pytest.raises(ConfigError, match="given twice, with a split and by separate files"):
        some_data(**{name: ("other",)})


def test_training_data_is_required() -> None:
    with pytest.raises(ConfigError, match="no training data was given") as caught:
        DataConfig(seq_length=16, valid_data_path=("v",))
    assert "preprocess_data.py" in caught.value.fix


@pytest.mark.parametrize(
    "paths",
    [
        {"data_path": ("p",)},
        {"valid_data_path": ("p",)},
        {"train_weighted_split_paths": ("train: 1 0:1 p",)},
    ],
)
def test_made_up_samples_are_all_the_data_of_a_run(paths: dict[str, Any]) -> None:
    config = DataConfig(seq_length=16, mock_data=True)
    assert config.is_split
    assert not DataConfig(seq_length=16, train_data_path=("t",)).is_split
    with pytest.raises(ConfigError, match="given twice, by paths and as made-up samples"):
        DataConfig(seq_length=16, mock_data=True, **paths)
    with pytest.raises(ConfigError, match="two kinds of training data"):
        DataConfig(seq_length=16, mock_data=True, fim_data=True)


def test_separate_files_need_no_split() -> None:
    config = DataConfig(seq_length=16, train_data_path=("t",), valid_data_path=("v",))
    assert config.data_path is None


def test_weighted_ranges_are_training_data_by_themselves() -> None:
    data = DataConfig(seq_length=16, train_weighted_split_paths=("T: 1 0:1 p",))
    assert data.has_weighted_splits
    assert not some_data().has_weighted_splits
    with pytest.raises(ConfigError, match="no training data was given"):
        DataConfig(seq_length=16, valid_weighted_split_paths=("V: 1 0:1 p",))


@pytest.mark.parametrize("name", ["data_path", "train_data_path", "test_data_path"])
def test_weighted_ranges_and_whole_paths_do_not_mix(name: str) -> None:
    with pytest.raises(ConfigError, match="by weighted ranges and by whole paths"):
        some_data(**{"data_path": None, "train_weighted_split_paths": ("T",), name: ("p",)})


def test_weighted_ranges_come_from_one_place() -> None:
    with pytest.raises(ConfigError, match="on the command line and in a file") as caught:
        some_data(
            data_path=None,
            train_weighted_split_paths=("T: 1 0:1 p",),
            train_weighted_split_paths_path="f",
        )
    assert "--train-weighted-split-paths-path" in str(caught.value)


def test_a_tokenizer_has_to_be_named() -> None:
    with pytest.raises(ConfigError, match="no tokenizer was named, so the vocabulary is unknown"):
        a_tokenizer(tokenizer_type=None)


def test_the_padding_of_the_vocabulary_is_positive() -> None:
    with pytest.raises(ConfigError, match="--make-vocab-size-divisible-by 0"):
        a_tokenizer(make_vocab_size_divisible_by=0)


@pytest.mark.parametrize(
    ("name", "value", "least"),
    [("vocab_size", 0, 1), ("pad_vocab_size_to", 0, 1), ("vocab_extra_ids", -1, 0)],
)
def test_sizes_of_the_vocabulary_are_sizes(name: str, value: int, least: int) -> None:
    with pytest.raises(ConfigError, match=f"it is below {least}") as caught:
        a_tokenizer(**{name: value})
    assert caught.value.found == f"--{name.replace('_', '-')} {value}"
