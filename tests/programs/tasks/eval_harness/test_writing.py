"""Settings of a task are applied, or refused by name."""

import pytest

from megatron.errors import ConfigError, DataError
from megatron.inference.sampling_params import SamplingParams
from tasks.eval_harness.writing import MOST_NEW, fitting, generation_request


def test_without_words_it_is_greedy() -> None:
    settings = generation_request({})
    assert settings.params == SamplingParams(greedy=True)
    assert (settings.until, settings.new_tokens) == ((), MOST_NEW)
    usual = generation_request({"until": ["\n\n"], "do_sample": False, "temperature": 0.0})
    assert usual.params.greedy
    assert generation_request({"do_sample": True, "temperature": 0.0}).params.greedy


def test_chance_is_as_bold_as_asked() -> None:
    given = {"do_sample": True, "temperature": 0.5, "top_k": 3, "top_p": 0.9, "max_new_tokens": 7}
    settings = generation_request(given)
    assert settings.params == SamplingParams(temperature=0.5, top_k=3, top_p=0.9)
    assert settings.new_tokens == 7
    assert generation_request({"temperature": 0.5}).params == SamplingParams(temperature=0.5)
    assert generation_request({"do_sample": True}).params == SamplingParams()


def test_a_text_ends_before_the_first_of_its_stops() -> None:
    settings = generation_request({"until": ["\n", "b"]})
    assert settings.cut("aab\nc") == "aa"
    assert settings.is_over("ab")
    assert not settings.is_over("aa")
    assert generation_request({"until": "stop"}).until == ("stop",)
    assert generation_request({"until": [""]}).cut("abc") == "abc"


def test_wishes_that_are_not_known_are_refused() -> None:
    with pytest.raises(
        ConfigError, match="a setting of generation that is not supported"
    ) as raised:
        generation_request({"num_beams": 4, "until": []})
    assert raised.value.found == "num_beams=4"
    assert "--gen-kwargs" in raised.value.fix


def test_a_context_leaves_room_for_what_is_written() -> None:
    settings = generation_request({"max_gen_toks": 3})
    assert fitting([1, 2, 3, 4, 5], settings, 6) == [3, 4, 5]
    assert fitting([1], settings, 6) == [1]
    with pytest.raises(DataError, match="longer texts than the model can generate") as raised:
        fitting([1], settings, 3)
    assert raised.value.fix == "add --gen-kwargs max_gen_toks=1"
