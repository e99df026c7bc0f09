"""The data of a prefix LM: which windows have prefixes, and what is said and refused about them."""

import pytest

from megatron import log
from megatron.config.data import DataConfig
from megatron.data.data_utils import IndexPlace, build_datasets
from megatron.data.kinds.prefix_maker import PrefixedWindows, prefix_maker
from megatron.data.samples.mlm_dataset import MLMDataset
from megatron.data.samples.packed_mtf_dataset import PackedMTFDataset
from megatron.data.samples.prefix_dataset import PrefixDataset
from megatron.errors import ConfigError
from tests.unit.data.kinds.test_dataset_makers import EOD, Vocabulary, pairs, text


def built(tmp_path, *, tokenizer=None, **changes):
    given = {"seq_length": 41, "split": "70,20,10", "loss_on_targets_only": True} | changes
    data = DataConfig(**given)
    maker = prefix_maker(data, tokenizer=tokenizer or Vocabulary(), seed=7, is_builder=True)
    place = IndexPlace(cache_path=str(tmp_path / "cache"))
    return build_datasets(maker, data, num_samples=(12, 4, 0), place=place)


def test_each_way_to_name_data_gives_its_kind(tmp_path):
    corpus, of_pairs = text(tmp_path / "t", 0), pairs(tmp_path / "p", 0)
    for changes, kind in (
        ({"data_path": (corpus,)}, PrefixDataset),
        ({"mock_data": True}, PrefixDataset),
        ({"data_path": (of_pairs,), "mtf": True}, PackedMTFDataset),
        ({"data_path": (corpus,), "noise_density": 0.15}, MLMDataset),
    ):
        train, valid, test = built(tmp_path, **changes)
        assert isinstance(train, kind)
        assert isinstance(valid, kind)
        assert test is None
        assert len(train) >= 12


def test_documents_have_prefixes_where_they_are_separated(tmp_path):
    corpus = text(tmp_path / "t", 0)
    rows = built(tmp_path, data_path=(corpus,)).train
    apart = built(tmp_path, data_path=(corpus,), reset_attention_mask=True).train
    assert (rows.eod, apart.eod) == (None, EOD)
    assert rows.seed == apart.seed == 7
    assert rows[0]["text"].tolist() == apart[0]["text"].tolist()


def test_passes_over_the_documents_are_those_of_the_windows(tmp_path):
    corpus = text(tmp_path / "t", 0)
    data = DataConfig(seq_length=41, data_path=(corpus,), loss_on_targets_only=True)
    maker = prefix_maker(data, tokenizer=None, seed=7, is_builder=True)
    assert isinstance(maker, PrefixedWindows)
    train = built(tmp_path, data_path=(corpus,), split="1").train
    assert maker.epochs(train, 12) == maker.windows.epochs(train.dataset, 12)


class WithoutEnds(Vocabulary):
    """A tokenizer without an end of documents."""

    eod = None


@pytest.mark.parametrize("tokenizer", [WithoutEnds(), None])
def test_documents_cannot_have_prefixes_where_their_ends_are_unknown(tokenizer):
    data = DataConfig(seq_length=41, data_path=("p",), reset_attention_mask=True)
    with pytest.raises(ConfigError, match="without an end-of-document token"):
        prefix_maker(data, tokenizer=tokenizer, seed=7, is_builder=True)


def test_a_loss_of_what_the_model_sees_is_said(capsys, monkeypatch):
    monkeypatch.setattr(log._OUTPUT, "warned", set())
    for given in (False, True):
        data = DataConfig(seq_length=41, data_path=("p",), loss_on_targets_only=given)
        prefix_maker(data, tokenizer=None, seed=7, is_builder=True)
        said = "--loss-on-targets-only leaves them out" in capsys.readouterr().err
        assert said is not given
