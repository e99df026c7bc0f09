"""Several ranks: they compare what they run, and can start again in the same processes."""

import time
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

from megatron import device, program
from megatron.errors import ConfigError
from megatron.initialize import (
    end_peer_watch,
    initialize_megatron,
    is_initialised,
    shutdown_megatron,
)
from tests.support.ranks import run_on_ranks
from tests.support.tiny import tiny_run, write_tiny_corpus


def disagree_then_agree(corpus: str) -> tuple[str, tuple[int, int], float]:
    rank = dist.get_rank()
    try:
        initialize_megatron(tiny_run(corpus, lr=0.1, check_collectives=rank == 1))
    except ConfigError as error:
        message = f"{error.problem}: {error.found}"
    assert not is_initialised()
    assert dist.is_initialized(), "the caller's process group stays"
    runtime = initialize_megatron(tiny_run(corpus, tensor_model_parallel_size=2))
    place = (runtime.launch.rank, runtime.launch.world_size)
    drawn = float(torch.rand(()))
    with mock.patch("megatron.device.host.available_memory_bytes", return_value=1000):
        assert device.free_memory_bytes() == 500, "both ranks are on this host"
    shutdown_megatron()
    return message, place, drawn


def test_ranks_with_other_flags_are_named_and_a_retry_works(tmp_path: Path) -> None:
    results = run_on_ranks(2, disagree_then_agree, write_tiny_corpus(tmp_path))
    for message, _, _ in results:
        assert message.startswith("the ranks do not run the same thing: flags: ")
        assert message.count(" on rank 0") == message.count(" on rank 1") == 1
    assert [place for _, place, _ in results] == [(0, 2), (1, 2)]
    first, second = (drawn for _, _, drawn in results)
    assert first == second, "default generators are equal over tp"


def edited_on_one_node(corpus: str) -> str:
    code = {"code of megatron": f"{dist.get_rank():016x}", "code of the program": ""}
    with mock.patch("megatron.initialize.source_digests", return_value=code):
        try:
            initialize_megatron(tiny_run(corpus))
        except ConfigError as error:
            return str(error)
    return ""


def test_ranks_with_other_code_under_one_version_are_named(tmp_path: Path) -> None:
    for message in run_on_ranks(2, edited_on_one_node, write_tiny_corpus(tmp_path)):
        assert f"code of megatron: {0:016x} on rank 0, {1:016x} on rank 1" in message
        assert "same flags, code, Python and torch" in message


def fail_alone_after_the_watch(corpus: str) -> bool:
    initialize_megatron(tiny_run(corpus))
    end_peer_watch()
    ended = dist.get_rank() == 1
    if ended:
        for notify in list(program._ON_FAILURE):
            notify("this rank fails")
    time.sleep(1.5)  # three looks of a watch, and no grace
    shutdown_megatron()
    return ended


def test_the_end_of_a_rank_concerns_no_other_after_the_watch_has_ended(tmp_path: Path) -> None:
    found = run_on_ranks(2, fail_alone_after_the_watch, write_tiny_corpus(tmp_path))
    assert found == [False, True]
