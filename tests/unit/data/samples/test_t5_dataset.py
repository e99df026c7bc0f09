"""T5's items, one by one, against a naive version written from the description of Megatron's."""

import pickle

import numpy as np
import pytest

from megatron.data.data_utils import DocumentSlice
from megatron.data.samples.t5_dataset import T5Dataset, T5Recipe
from megatron.errors import DataError
from tests.unit.data.corpora import cache_in
from tests.unit.data.samples.test_masking import naive_masking
from tests.unit.data.sentence_corpora import (
    BOS,
    EOS,
    PAD,
    SENTINELS,
    VOCABULARY,
    random_documents,
    write_sentences,
)

SEED = 77
KEYS = ["text_enc", "text_dec", "labels", "loss_mask", "truncated"]
KEYS += ["enc_mask", "dec_mask", "enc_dec_mask"]


def naive_item(sentences, index, *, target, encoder, decoder):
    """One item as it is described; masks are products of tests on ids, as there."""
    flat = [token for sentence in sentences for token in sentence]
    tokens = flat[:target]
    rng = np.random.RandomState(SEED + index)
    masked, _, spans = naive_masking(tokens, rng, probability=0.15, target=target, style="t5")
    left, enc, dec, out, start = list(SENTINELS), [], [BOS], [], 0
    for span in spans:
        sentinel = left.pop(0)
        dec += [sentinel] + [tokens[position] for position in span]
        out += [sentinel] + [tokens[position] for position in span]
        enc += [*masked[start : span[0]], sentinel]
        start = span[-1] + 1
    enc, out = enc + masked[start:], [*out, EOS]
    loss_mask = [1] * len(dec) + [0] * (decoder - len(dec))
    labels = out + [-1] * (decoder - len(out))
    enc, dec = enc + [PAD] * (encoder - len(enc)), dec + [PAD] * (decoder - len(dec))

    def product(rows, columns):
        return [[int(row >= 1 and column >= 1) for column in columns] for row in rows]

    causal = [
        [seen * int(j <= i) for j, seen in enumerate(row)]
        for i, row in enumerate(product(dec, dec))
    ]
    return {
        "text_enc": enc,
        "text_dec": dec,
        "labels": labels,
        "loss_mask": loss_mask,
        "truncated": int(len(flat) > target),
        "enc_mask": product(enc, enc),
        "dec_mask": causal,
        "enc_dec_mask": product(dec, enc),
    }


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_sentences(tmp_path_factory.mktemp("t5") / "corpus", random_documents(80))


def make(corpus, folder, *, num_samples=60, square_masks=True, **changes):
    recipe = {
        "vocabulary": VOCABULARY,
        "bos": BOS,
        "eos": EOS,
        "sentinels": SENTINELS,
        "seq_length": 48,
        "decoder_seq_length": 24,
        "seed": SEED,
        "short_seq_prob": 0.2,
    }
    return T5Dataset(
        corpus,
        DocumentSlice(name="train", start=0, stop=80),
        recipe=T5Recipe(**(recipe | changes)),
        num_samples=num_samples,
        cache=cache_in(folder),
        square_masks=square_masks,
    )


@pytest.mark.parametrize(("encoder", "decoder"), [(48, 24), (100, 40)])
def test_items_are_those_of_the_naive_version(corpus, tmp_path, encoder, decoder):
    dataset = make(corpus, tmp_path, seq_length=encoder, decoder_seq_length=decoder)
    for i in range(len(dataset)):
        start, stop, target = dataset.samples.row(i)
        item = dataset[i]
        assert list(item) == KEYS
        assert {value.dtype for value in item.values()} == {np.dtype(np.int64)}
        assert {key: value.tolist() for key, value in item.items()} == naive_item(
            [corpus.get(sentence).tolist() for sentence in range(start, stop)],
            i,
            target=target,
            encoder=encoder,
            decoder=decoder,
        )


def test_without_square_masks_there_is_one_of_padding(corpus, tmp_path):
    whole, lean = make(corpus, tmp_path), make(corpus, tmp_path, square_masks=False)
    assert lean.fingerprint() == whole.fingerprint()
    for i in range(10):
        one, other = whole[i], lean[i]
        assert list(other) == [*KEYS[:5], "padding_mask"]
        assert all(np.array_equal(one[key], other[key]) for key in KEYS[:5])
        assert np.array_equal(other["padding_mask"], one["enc_mask"][0])


def test_the_two_sides_hold_every_token_of_the_text_once(corpus, tmp_path):
    dataset = make(corpus, tmp_path)
    for i in range(40):
        start, stop, target = dataset.samples.row(i)
        flat = np.concatenate(dataset.samples.sentences(start, stop))[:target].tolist()
        item = dataset[i]
        spans: dict[int, list[int]] = {}
        for token in item["text_dec"][item["loss_mask"] == 1].tolist()[1:]:
            if token in SENTINELS:
                last = spans[token] = []
            else:
                last.append(token)
        whole = []
        for token in item["text_enc"].tolist():
            whole += spans.get(token, [token] if token != PAD else [])
        assert whole == flat


def test_text_of_id_zero_is_text(corpus, tmp_path, monkeypatch):
    """Megatron takes every id 0 for padding; here padding begins where the text ends."""
    dataset = make(corpus, tmp_path, masked_lm_prob=0.0)
    zeros = [np.zeros(6, np.uint16)]
    monkeypatch.setattr(dataset.samples, "row", lambda index: [0, 1, 6])
    monkeypatch.setattr(dataset.samples, "sentences", lambda start, stop: zeros)
    assert dataset[0]["enc_mask"].sum() == 36


def test_spans_that_do_not_fit_the_decoder_are_refused(corpus, tmp_path):
    dataset = make(corpus, tmp_path, decoder_seq_length=2)
    with pytest.raises(DataError, match=r"the spans of sample \d+ of train do not fit") as caught:
        [dataset[i] for i in range(len(dataset))]
    assert "room for 2" in str(caught.value)


def test_too_few_sentinels_are_refused(corpus, tmp_path):
    dataset = make(corpus, tmp_path, sentinels=())
    with pytest.raises(DataError, match="more spans than there are sentinels") as caught:
        [dataset[i] for i in range(len(dataset))]
    assert "0 sentinels" in str(caught.value)


def test_an_item_longer_than_its_row_is_refused(corpus, tmp_path, monkeypatch):
    dataset = make(corpus, tmp_path, masked_lm_prob=0.0)
    monkeypatch.setattr(dataset.samples, "row", lambda index: [0, corpus.doc_idx[-1], 10**6])
    with pytest.raises(DataError, match="sample 3 of train is longer than its row"):
        dataset[3]


@pytest.mark.parametrize(
    "changes", [{"seq_length": 3}, {"decoder_seq_length": 1}, {"masked_lm_prob": -0.1}]
)
def test_a_recipe_out_of_range_is_refused(corpus, tmp_path, changes):
    with pytest.raises(ValueError, match=r"seq_length .* masked_lm_prob"):
        make(corpus, tmp_path, **changes)


def test_whatever_an_item_depends_on_changes_the_fingerprint(corpus, tmp_path):
    made = [
        make(corpus, tmp_path, **changes)
        for changes in (
            {},
            {"seq_length": 49},
            {"decoder_seq_length": 25},
            {"seed": 1},
            {"masked_lm_prob": 0.2},
            {"short_seq_prob": 0.21},
            {"bos": 9},
            {"eos": 9},
            {"sentinels": SENTINELS[::-1]},
        )
    ]
    assert len({dataset.fingerprint() for dataset in made}) == len(made)


def test_a_copy_in_another_process_gives_the_same_items(corpus, tmp_path):
    dataset = make(corpus, tmp_path)
    copy = pickle.loads(pickle.dumps(dataset))
    copy.check_unchanged()
    assert (copy.fingerprint(), len(copy)) == (dataset.fingerprint(), len(dataset))
    assert copy[5]["text_dec"].tolist() == dataset[5]["text_dec"].tolist()
