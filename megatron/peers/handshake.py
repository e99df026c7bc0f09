"""The meeting of all ranks at the rendezvous, before they make a process group.

A process group that is made of the wrong ranks hangs, or trains with strangers. So every rank
writes into the store who it is, where it runs and what it was told, and rank 0 judges: who is
missing, came twice, belongs to another job, or was told something else. What a reader would get
wrong: a call to a store may never return, whatever its timeout says, where something else listens.
"""

import contextlib
import json
import socket
import threading
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import NamedTuple

from torch._C._distributed_c10d import Store, TCPStore  # torch.distributed's own, untyped there

from megatron import log
from megatron.errors import ConfigError, MachineError, MegatronError, first_line
from megatron.json_values import JsonObject
from megatron.peers.differences import launch_problem, named
from megatron.peers.stacks import ProcessName

_COUNT = "megatron/meeting/count"  # of the ranks that have come
_VERDICT = "megatron/meeting/verdict"
_READ = "megatron/meeting/read"  # how many have read it
_SILENT_S = 10.0  # after which a socket that accepts and says nothing is no store
_PROBE_S = 2.0
_LOG_S = 30.0  # between two lines about ranks that are missing
_READ_S = 3.0  # for the others to read a verdict before the host of the store ends
_POLL_S = (0.005, 0.25)  # first and last pause between two looks
_UNREADABLE = ConfigError(
    "something that is no rank of this version wrote to the rendezvous",
    found="a record that cannot be read",
    fix="choose another MASTER_PORT, or the same version of the code on every node",
)


class Member(NamedTuple):
    """One rank as it presents itself."""

    rank: int
    world_size: int
    process: ProcessName
    facts: Mapping[str, str]  # which have to be equal on all ranks

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.process})"


def rendezvous_store(address: tuple[str, int], *, is_host: bool, within_s: float) -> Store:
    """Return the store at `address`, and host it, or raise within a time that holds.

    It does not wait for other ranks; `meet` does.

    Raises:
        MachineError: nothing there answers as a store does, or its port is in use.
    """
    results: list[Store | BaseException] = []

    def call() -> None:
        try:
            timeout = timedelta(seconds=within_s)
            results.append(
                TCPStore(
                    *address,
                    is_master=is_host,
                    timeout=timeout,
                    wait_for_workers=False,
                    multi_tenant=True,
                )
            )
        except BaseException as error:
            results.append(error)

    thread = threading.Thread(target=call, name="rendezvous", daemon=True)
    thread.start()
    began, silent_for = time.monotonic(), 0.0
    while thread.is_alive() and (waited := time.monotonic() - began) < within_s:
        thread.join(min(_PROBE_S, within_s - waited))
        silent_for = silent_for + _PROBE_S if thread.is_alive() and _accepts(address) else 0.0
        if silent_for >= _SILENT_S:
            break
    result = results[0] if results else None
    if result is not None and not isinstance(result, BaseException):
        return result
    if result is not None and "EADDRINUSE" in str(result):
        raise MachineError(
            "the port of the rendezvous is in use",
            found=f"{address[0]}:{address[1]}",
            fix="choose another MASTER_PORT (torchrun --master-port), or end what holds it",
        ) from result
    what = first_line(result) if result is not None else "nobody listens there"
    if silent_for:
        what = "something accepts connections there and does not answer as a rendezvous store does"
    raise MachineError(
        "the ranks could not find each other",
        found=f"{address[0]}:{address[1]}, for {time.monotonic() - began:.0f} s: {what}",
        fix="start rank 0, and let every node reach MASTER_ADDR; if another program uses that "
        "port, choose another MASTER_PORT",
    ) from result


def meet(store: Store, member: Member, within_s: float) -> None:
    """Return once all ranks of this job are there and were told the same.

    Raises:
        MachineError: ranks are missing; the same on all that are there.
        ConfigError: ranks came twice, belong to another job, or were told something else.
    """
    place = store.add(_COUNT, 1)
    store.set(f"megatron/meeting/{place}", json.dumps(member))
    if member.rank == 0:
        outcome = _judge(store, member, within_s)
        problem = outcome if isinstance(outcome, MegatronError) else None
        store.set(_VERDICT, json.dumps(_encoded(outcome)))
    else:
        problem = _verdict(store, member, place, within_s)
    store.add(_READ, 1)
    if problem is None:
        return
    if member.rank == 0:  # it may host the store
        deadline = time.monotonic() + _READ_S
        while store.add(_READ, 0) < store.add(_COUNT, 0) and time.monotonic() < deadline:
            time.sleep(_POLL_S[0])
    raise problem


def _judge(store: Store, own: Member, within_s: float) -> MegatronError | list[int]:
    """Wait for all ranks; return what is wrong with them, or in which place each rank came."""
    members: dict[int, Member] = {}
    places: dict[int, int] = {}
    began = logged = time.monotonic()
    seen, pause = 0, _POLL_S[0]
    while len(members) < own.world_size:
        while seen < store.add(_COUNT, 0):
            seen += 1
            arrived = _member(store.get(f"megatron/meeting/{seen}"))
            if arrived is None:
                return _UNREADABLE
            problem = _stranger(arrived, own, members)
            if problem is not None:
                return problem
            members[arrived.rank], places[arrived.rank] = arrived, seen
            pause = _POLL_S[0]
        now = time.monotonic()
        if len(members) < own.world_size:
            missing = [rank for rank in range(own.world_size) if rank not in members]
            if now - began >= within_s:
                return MachineError(
                    "ranks are missing at the start",
                    found=f"{named(missing)} of {own.world_size} did not come within "
                    f"{within_s:.0f} s; {_places(members)} came",
                    fix="read the logs of the missing ranks; if they start slowly, allow more "
                    "--distributed-timeout-minutes",
                )
            if now - logged >= _LOG_S:
                logged = now
                log.info(f"waiting for {named(missing)} to start, for {now - began:.0f} s now")
            time.sleep(pause)
            pause = min(1.5 * pause, _POLL_S[1])
    problem = launch_problem([members[rank].facts for rank in range(own.world_size)])
    return problem or [places[rank] for rank in range(own.world_size)]


def _stranger(arrived: Member, own: Member, members: Mapping[int, Member]) -> MegatronError | None:
    """Return why a process that has come is no rank of this job."""
    if arrived.world_size != own.world_size or not 0 <= arrived.rank < own.world_size:
        return ConfigError(
            "a rank of another job came to this rendezvous",
            found=f"{arrived} of {arrived.world_size} ranks; {own} expects {own.world_size}",
            fix="give each job a MASTER_PORT of its own, and every rank the same WORLD_SIZE",
        )
    before = members.get(arrived.rank)
    return None if before is None else _twice(before, arrived)


def _twice(first: Member, second: Member) -> ConfigError:
    return ConfigError(
        "two processes were started as one rank",
        found=f"{first} and {second}",
        fix="give each process a RANK of its own; end those that an earlier start left",
    )


def _verdict(store: Store, own: Member, place: int, within_s: float) -> MegatronError | None:
    """Wait for the verdict of rank 0, which waits as long for all ranks."""
    deadline, pause = time.monotonic() + within_s + 2 * _READ_S, _POLL_S[0]
    while not store.check([_VERDICT]):
        if time.monotonic() > deadline:
            return MachineError(
                "rank 0 did not come to the start, or stopped there",
                found=f"no verdict of rank 0 for {within_s:.0f} s; {own} waits",
                fix="read the log of rank 0, and start the job again",
            )
        time.sleep(pause)
        pause = min(1.5 * pause, _POLL_S[1])
    record = json.loads(store.get(_VERDICT))
    if "places" in record:
        places = record["places"]
        if own.rank < len(places) and places[own.rank] == place:
            return None
        # It came after the others had met.
        there = _member(store.get(f"megatron/meeting/{places[min(own.rank, len(places) - 1)]}"))
        return _UNREADABLE if there is None else _stranger(own, there, {there.rank: there})
    kind = MachineError if record.pop("kind") == MachineError.__name__ else ConfigError
    return kind(record.pop("problem"), **record)


def _encoded(outcome: MegatronError | list[int]) -> JsonObject:
    if isinstance(outcome, MegatronError):
        text = {"problem": outcome.problem, "found": str(outcome.found), "fix": outcome.fix}
        return {"kind": type(outcome).__name__, **text}
    return {"places": [*outcome]}


def _member(text: bytes) -> Member | None:
    """Return the member of a record; None if it is none."""
    try:
        rank, world_size, process, facts = json.loads(text)
        return Member(int(rank), int(world_size), ProcessName(*process), dict(facts))
    except (ValueError, TypeError, OverflowError, RecursionError):
        return None


def _places(members: Mapping[int, Member]) -> str:
    shown = [str(members[rank]) for rank in sorted(members)[:4]]
    left = len(members) - len(shown)
    return ", ".join(shown) + (f" and {left} more" if left else "")


def _accepts(address: tuple[str, int]) -> bool:
    """Return whether something accepts connections at an address."""
    with contextlib.suppress(OSError), socket.create_connection(address, timeout=_PROBE_S):
        return True
    return False
