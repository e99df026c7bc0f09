"""Ranks that are started wrong: each error is named on every rank, long before a timeout."""

import socket
import sys
import time
from pathlib import Path

from torch.distributed import TCPStore

from megatron.errors import ConfigError, MachineError
from tests.support.launch import PRETRAIN, Started, all_ended, free_port, small_run

ENDS_WITHIN_S = 60.0  # a few seconds by design, and room for a machine under load
LAUNCH = {"MASTER_ADDR": "127.0.0.1", "LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "2"}
BRIEF = ("--distributed-timeout-minutes", "0.05")  # three seconds


def as_rank(rank: int, port: int, flags: list[str], folder: Path, **given: str) -> Started:
    variables = {"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_PORT": str(port)}
    words = [sys.executable, PRETRAIN, *flags]
    return Started(words, cwd=folder, environment=LAUNCH | variables | given)


def test_a_rank_that_does_not_come_is_named(tmp_path: Path) -> None:
    with as_rank(0, free_port(), small_run(None, *BRIEF), tmp_path) as first:
        ended = first.ended(within_s=ENDS_WITHIN_S)
    assert ended.status == MachineError.exit_code, ended.text
    assert "ranks are missing at the start" in ended.err
    assert "rank 1 of 2 did not come within 3 s; rank 0 (process " in ended.err


def test_two_processes_of_one_rank_end_all(tmp_path: Path) -> None:
    # As torchrun's agent does, so that the first rank is started when both others are there.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port, flags, agent = store.port, small_run(None), {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    with (
        as_rank(1, port, flags, tmp_path, **agent) as second,
        as_rank(1, port, flags, tmp_path, **agent) as third,
    ):
        deadline = time.monotonic() + ENDS_WITHIN_S
        while store.add("default_pg/megatron/meeting/count", 0) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        with as_rank(0, port, flags, tmp_path, **agent) as first:
            ended = all_ended([first, second, third], within_s=ENDS_WITHIN_S)
    for one in ended:
        assert one.status == ConfigError.exit_code, one.text
        assert "two processes were started as one rank" in one.err
        assert "end those that an earlier start left" in one.err


def test_a_rank_of_another_job_ends_all(tmp_path: Path) -> None:
    port, flags = free_port(), small_run(None, "--global-batch-size", "8")
    stranger = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}
    with (
        as_rank(0, port, flags, tmp_path) as first,
        as_rank(3, port, flags, tmp_path, **stranger) as third,
    ):
        ended = all_ended([first, third], within_s=ENDS_WITHIN_S)
    for one in ended:
        assert one.status == ConfigError.exit_code, one.text
        assert "a rank of another job came to this rendezvous" in one.err
        assert "of 4 ranks; rank 0 (process " in one.err


def test_other_flags_are_named_before_a_group_is_made(tmp_path: Path) -> None:
    port = free_port()
    with (
        as_rank(0, port, small_run(None, "--seed", "1"), tmp_path) as first,
        as_rank(1, port, small_run(None, "--seed", "2"), tmp_path) as second,
    ):
        ended = all_ended([first, second], within_s=ENDS_WITHIN_S)
    for one in ended:
        assert one.status == ConfigError.exit_code, one.text
        assert "the ranks do not run the same thing" in one.err
        assert "flags: " in one.err


def test_a_port_that_something_else_holds_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        with as_rank(0, port, small_run(None), tmp_path) as one:
            ended = one.ended(within_s=ENDS_WITHIN_S)
    assert ended.status == MachineError.exit_code, ended.text
    assert "the port of the rendezvous is in use" in ended.err
    assert f"127.0.0.1:{port}" in ended.err
