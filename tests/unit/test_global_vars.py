"""The one runtime of a process: made once, read by programs, gone after shutdown."""

import dataclasses
import os
from collections.abc import Iterator
from typing import Any

import pytest

from megatron import global_vars
from megatron.errors import ConfigError, NotInitialisedError
from megatron.global_vars import Runtime
from megatron.launch import Launch
from megatron.mpu.context import ParallelContext
from megatron.mpu.random import RandomStreams
from megatron.timers import Timers
from megatron.tokenizer.tokenizer import build_tokenizer
from tests.unit.config.groups import a_run


@pytest.fixture(autouse=True)
def _no_runtime() -> Iterator[None]:
    global_vars.clear_runtime()
    yield
    global_vars.clear_runtime()


def a_runtime(**changes: Any) -> Runtime:
    runtime = Runtime(
        config=a_run(extra={"mine": 7}),
        launch=Launch(),
        context=ParallelContext.single(),
        streams=RandomStreams(1),
        tokenizer=build_tokenizer(tokenizer_type="NullTokenizer", vocab_size=100),
        timers=Timers(),
        initialised_at="train.py:3",
        process=os.getpid(),
    )
    return dataclasses.replace(runtime, **changes)


def test_what_was_set_is_what_programs_get() -> None:
    runtime = a_runtime()
    global_vars.set_runtime(runtime)
    assert global_vars.get_runtime() is runtime
    assert global_vars.get_timers() is runtime.timers
    assert global_vars.get_tokenizer() is runtime.tokenizer
    args = global_vars.get_args()
    assert (args.num_layers, args.mine) == (2, 7)


def test_arguments_are_read_and_not_written() -> None:
    global_vars.set_runtime(a_runtime())
    with pytest.raises(ConfigError, match="the arguments of a run cannot be changed"):
        global_vars.get_args().lr = 1.0


@pytest.mark.parametrize("get", ["get_args", "get_timers", "get_tokenizer", "get_runtime"])
def test_nothing_is_there_before_initialisation(get: str) -> None:
    with pytest.raises(NotInitialisedError, match="Megatron is not initialised in this process"):
        getattr(global_vars, get)()


def test_a_second_initialisation_names_the_first() -> None:
    global_vars.set_runtime(a_runtime())
    with pytest.raises(NotInitialisedError, match="called twice in one process") as caught:
        global_vars.set_runtime(a_runtime(initialised_at="train.py:9"))
    assert caught.value.found == "first at train.py:3, again at train.py:9"


def test_after_shutdown_another_may_be_made() -> None:
    global_vars.set_runtime(a_runtime())
    global_vars.clear_runtime()
    with pytest.raises(NotInitialisedError, match="not initialised"):
        global_vars.get_runtime()
    global_vars.set_runtime(a_runtime())


def test_a_forked_child_has_not_initialised_anything() -> None:
    parent = 1  # of another process, whatever its number
    global_vars.set_runtime(a_runtime(process=parent))
    with pytest.raises(NotInitialisedError, match="initialised in process 1"):
        global_vars.get_runtime()
    global_vars.set_runtime(a_runtime())
