"""Masking draws what Megatron draws: compared with a naive version written from its description."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.data.samples.masking import (
    MaskingStyle,
    MaskingVocabulary,
    attention_mask,
    mask_words,
    padded,
)
from megatron.errors import ConfigError, DataError
from tests.support.examples import examples
from tests.unit.data.sentence_corpora import (
    CLS,
    FIRST_WORD,
    MASK,
    SEP,
    VOCAB_SIZE,
    VOCABULARY,
    Pieces,
)


def naive_masking(tokens, rng, *, probability, target, style):
    """The algorithm step by step with plain lists; shares no code with the library.

    Returns the masked text, every masked position, and the spans.
    """
    candidates = []
    for position, token in enumerate(tokens):
        if token in (CLS, SEP):
            continue
        if Pieces().piece(token).startswith("##") and candidates:
            candidates[-1].append(position)
        else:
            candidates.append([position])
    output = list(tokens)
    if probability == 0:
        return output, [], []
    budget = min(probability * target, max(1, round(len(tokens) * probability)))
    most = {"bert": 3, "t5": 10}[style]
    ngrams = np.arange(1, most + 1)
    pvals = 1.0 / np.arange(1, most + 1)
    pvals /= pvals.sum(keepdims=True)
    lists = [[candidates[i : i + n] for n in ngrams] for i in range(len(candidates))]
    rng.shuffle(lists)
    masked, spans, covered = [], [], set()
    for ngram in lists:
        if len(masked) >= budget:
            break
        if style == "bert":
            n = rng.choice(ngrams[:3], p=pvals[:3] / pvals[:3].sum(keepdims=True))
        else:
            n = min(rng.geometric(0.2), most)
        index_set = [position for word in ngram[n - 1] for position in word]
        n -= 1
        while len(masked) + len(index_set) > budget:
            if n == 0:
                break
            index_set = [position for word in ngram[n - 1] for position in word]
            n -= 1
        if len(masked) + len(index_set) > budget:
            continue
        if any(index in covered for index in index_set):
            continue
        for index in index_set:
            covered.add(index)
            if style == "t5" or rng.random() < 0.8:
                output[index] = MASK
            elif rng.random() < 0.5:
                output[index] = tokens[index]
            else:
                output[index] = list(range(VOCAB_SIZE))[rng.randint(0, VOCAB_SIZE)]
            masked.append(index)
        spans.append(index_set)
    rng.shuffle(lists)
    return output, sorted(masked), sorted(spans, key=lambda span: span[0])


texts = st.lists(
    st.one_of(st.integers(FIRST_WORD, VOCAB_SIZE - 1), st.sampled_from([CLS, SEP, FIRST_WORD])),
    max_size=80,
)


@examples(200)
@given(
    texts,
    st.integers(0, 2**32 - 1),
    st.sampled_from([0.0, 0.05, 0.15, 0.5, 1.0]),
    st.integers(2, 100),
    st.sampled_from(["bert", "t5"]),
)
def test_masks_and_every_later_draw_are_those_of_the_naive_version(
    tokens, seed, probability, target, style
):
    ours, reference = np.random.RandomState(seed), np.random.RandomState(seed)
    masked = mask_words(
        tokens,
        VOCABULARY,
        rng=ours,
        probability=probability,
        target_length=target,
        style=MaskingStyle[style.upper()],
    )
    naive = naive_masking(tokens, reference, probability=probability, target=target, style=style)
    assert (masked.text, masked.positions, masked.spans) == naive
    assert ours.randint(0, 2**31, 4).tolist() == reference.randint(0, 2**31, 4).tolist()


def mask(tokens, probability=0.5, target=20, style=MaskingStyle.BERT, seed=0):
    return mask_words(
        tokens,
        VOCABULARY,
        rng=np.random.RandomState(seed),
        probability=probability,
        target_length=target,
        style=style,
    )


def test_a_word_is_masked_whole_or_not_at_all():
    word, piece = FIRST_WORD + 1, FIRST_WORD  # piece continues the word before it
    tokens = [CLS] + [word, piece, piece] * 6 + [SEP]
    for seed in range(40):
        positions = set(mask(tokens, seed=seed).positions)
        for start in range(1, 19, 3):
            assert len(positions & {start, start + 1, start + 2}) in (0, 3)


def test_the_budget_of_a_short_target_may_be_less_than_one_word():
    assert mask([FIRST_WORD] * 6, probability=0.15, target=6).positions == []
    assert len(mask([FIRST_WORD + 1] * 6, probability=0.15, target=7).positions) == 1


def test_eight_in_ten_become_the_mask_and_one_stays():
    tokens = [FIRST_WORD + 1] * 4000
    masked = mask(tokens, probability=1.0, target=4000)
    found = np.array(masked.text)
    assert len(masked.positions) > 3000  # not all: spans that touch a masked word are left out
    assert 0.77 < (found[masked.positions] == MASK).mean() < 0.83
    assert 0.08 < (found[masked.positions] == tokens[0]).mean() < 0.13
    t5 = mask(tokens, probability=1.0, target=4000, style=MaskingStyle.T5)
    assert {t5.text[position] for position in t5.positions} == {MASK}


@pytest.mark.parametrize("token", [VOCAB_SIZE, -1])
def test_a_token_outside_of_the_vocabulary_is_refused(token):
    with pytest.raises(DataError, match="outside of the vocabulary") as caught:
        mask([FIRST_WORD, token])
    assert "the vocabulary has 200" in str(caught.value)


def test_a_tokenizer_without_special_tokens_is_refused():
    class Plain(Pieces):
        mask = None
        sep = None

    with pytest.raises(ConfigError, match="lacks tokens that masking needs") as caught:
        MaskingVocabulary.of(Plain())
    assert "no [SEP], [MASK]" in str(caught.value)


def test_whatever_masking_depends_on_changes_the_fingerprint():
    class Other(Pieces):
        pad = 9

    class Larger(Pieces):
        vocab_size = 201

    vocabularies = [VOCABULARY, *(MaskingVocabulary.of(kind()) for kind in (Other, Larger))]
    assert len({vocabulary.fingerprint() for vocabulary in vocabularies}) == 3
    assert MaskingVocabulary.of(Pieces()).fingerprint() == VOCABULARY.fingerprint()


def test_a_row_is_filled_up_and_never_cut():
    assert padded([4, 5], 4, -1).tolist() == [4, 5, -1, -1]
    assert padded([], 1, 0).dtype == np.int64
    with pytest.raises(ValueError, match="3 ids do not fit into 2"):
        padded([1, 2, 3], 2, 0)


def test_text_sees_text_and_nothing_else():
    assert attention_mask(1, 2, 2, 3).tolist() == [[1, 1, 0], [0, 0, 0]]
