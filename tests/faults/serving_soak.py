"""A real server of two ranks under a mixed load for minutes: every request ends, nothing is left.

`python -m tests.faults.serving_soak --minutes 10` (or `make soak-serving MINUTES=10`) trains a tiny
GPT, serves it, and lets clients send requests of all sorts (`tests/support/serving/mixed_load.py`)
while ranks are stopped and killed, and operators pause, suspend and give new weights. At the end
all blocks have to be back and the server has to stop by itself. Prints tables in Markdown.
"""

import argparse
import asyncio
import json
import math
import os
import random
import re
import signal
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.inference.http_client import http_request
from megatron.launch import free_port
from tests.support.launch import (
    PRETRAIN,
    ROOT,
    Started,
    all_ended,
    byte_corpus,
    each_rank,
    run_program,
    small_run,
)
from tests.support.pages import write_between
from tests.support.serving.mixed_load import HUNG, LoadReport, run_mixed_load

SERVER = str(ROOT / "tools" / "run_text_generation_server.py")
PAGE = ROOT / "docs" / "serving.md"
MARKS = ("<!-- soak: written by `make soak-serving WRITE=1` -->", "<!-- soak: end -->")
CONTEXT = 512  # tokens
CLIENTS = 24
MAX_REQUESTS = 16  # prompts at once: fewer than the clients may send, so that some get 429
REQUEST_TIMEOUT_S = 4  # some requests are longer on purpose
HUNG_AFTER_S = 30.0  # REQUEST_TIMEOUT_S, a stop of the process, and a busy machine
DRAINED_WITHIN_S = 20.0
STOPPED_S = 2.0  # less than the deadline of requests, and than the lease of a rank
PAUSED_S = 1.0
OPERATED_WITHIN_S = 90.0
ENDED_WITHIN_S = 30.0  # ranks need 8 s, on an idle machine
RANKS = 2
SHARES = {"tensor": "--tensor-model-parallel-size", "stages": "--pipeline-model-parallel-size"}
MEAN_S = 20.0  # between two events
# What memory may grow by from the second third of a soak to the last one. Kernels for new shapes
# are compiled in the first minutes; allocators give pages back late.
MOST_GROWTH_MIB = 24.0

_MIB = 1 << 20


@dataclass(slots=True)
class Soaked:
    """A server under load, as events see it.

    Attributes:
        port: of rank 0, also after a new start.
        pids: of all ranks.
        checkpoints: folders with weights of its model.
        start_again: ends what is left of the ranks, and returns the processes of new ones.
        is_lost: whether a rank is missing.
        found_at: when all ranks were there again, on the monotonic clock.
    """

    port: int
    pids: list[int]
    checkpoints: tuple[str, ...] = ()
    start_again: Callable[[], list[int]] = list
    is_lost: bool = False
    found_at: float = -math.inf

    def was_lost(self, since: float) -> bool:
        """Return whether a rank has been missing at any time since one of the monotonic clock."""
        return self.is_lost or self.found_at > since


Event = Callable[[Soaked, random.Random], Awaitable[None]]
"""Something that happens to a server or its ranks; returns when it is over."""


async def stop_a_rank_for_a_while(server: Soaked, drawn: random.Random) -> None:
    """Stop the process of a rank and let it go on."""
    pid = drawn.choice(server.pids)
    os.kill(pid, signal.SIGSTOP)
    try:
        await asyncio.sleep(STOPPED_S)
    finally:
        os.kill(pid, signal.SIGCONT)


async def kill_a_rank(server: Soaked, drawn: random.Random) -> None:
    """Kill a rank; all others have to end by themselves, and are started again."""
    await _lose(server, drawn, signal.SIGKILL)


async def stop_a_rank_for_good(server: Soaked, drawn: random.Random) -> None:
    """Stop a rank; all others have to end by themselves, and are started again."""
    await _lose(server, drawn, signal.SIGSTOP)


async def freeze(server: Soaked, drawn: random.Random) -> None:
    """Pause the engine as it is, and resume it."""
    await _operate(server, "pause", {"mode": "freeze"})
    await asyncio.sleep(PAUSED_S)
    await _operate(server, "resume", {})


async def suspend(server: Soaked, drawn: random.Random) -> None:
    """Suspend the engine with its cache kept, in other memory or dropped, and resume it."""
    await _operate(server, "pause", {"mode": "freeze"})
    await _operate(server, "suspend", {"cache": drawn.choice(("keep", "offload", "drop"))})
    await asyncio.sleep(PAUSED_S)
    await _operate(server, "resume", {})


async def give_new_weights(server: Soaked, drawn: random.Random) -> None:
    """Let requests end, exchange the weights, and go on."""
    await _operate(server, "pause", {"mode": "drain", "timeout": 30})
    await _operate(server, "weights", {"load": drawn.choice(server.checkpoints)})
    await _operate(server, "resume", {})


EVENTS: Mapping[str, Event] = {
    f"SIGSTOP of a rank for {STOPPED_S:.0f} s": stop_a_rank_for_a_while,
    "pause and resume": freeze,
    "suspend and resume": suspend,
    "new weights": give_new_weights,
    "SIGKILL of a rank and a new start": kill_a_rank,
    "SIGSTOP of a rank for good and a new start": stop_a_rank_for_good,
}
# Ranks are lost in the first third only: after a new start memory says nothing of the time before.
WEIGHTS_AT_FIRST, WEIGHTS_LATER = (3, 2, 2, 2, 3, 2), (3, 2, 2, 2, 0, 0)


async def _lose(server: Soaked, drawn: random.Random, sent: signal.Signals) -> None:
    lost = drawn.choice(server.pids)
    server.is_lost = True
    os.kill(lost, sent)
    deadline = time.monotonic() + ENDED_WITHIN_S
    while any(_runs(pid) for pid in server.pids if pid != lost):
        if time.monotonic() > deadline:
            raise SoakError(f"ranks still run {ENDED_WITHIN_S:.0f} s after {sent.name} of another")
        await asyncio.sleep(0.1)
    server.pids = await asyncio.to_thread(server.start_again)
    server.is_lost, server.found_at = False, time.monotonic()


def _runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


async def _operate(server: Soaked, action: str, body: Mapping[str, object]) -> None:
    async with asyncio.timeout(OPERATED_WITHIN_S):
        data = json.dumps(body).encode()
        answer = await http_request(server.port, "POST", f"/control/{action}", data)
    if answer.status != 200:
        raise SoakError(f"{action} {body}: status {answer.status}: {answer.body[:300]!r}")


class SoakError(Exception):
    """Something that had to happen did not: the soak ends."""


@dataclass(frozen=True, slots=True)
class Minute:
    """The state of a server at a time.

    Attributes:
        minutes: since the load began.
        memory: bytes of anonymous memory of all ranks.
        generated: tokens since the last start.
    """

    minutes: float
    memory: int
    generated: int


@dataclass(slots=True)
class ServingSoak:
    """What came of a soak."""

    load: LoadReport = field(default_factory=LoadReport)
    minutes: list[Minute] = field(default_factory=list)
    events: dict[str, int] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


async def soak(
    server: Soaked, *, seconds: float, seed: int, every_s: float = 60.0, mean_s: float = MEAN_S
) -> ServingSoak:
    """Load a server for so long, and return what came of it."""
    found, until = ServingSoak(), asyncio.Event()
    start = time.monotonic()

    async def watch() -> None:
        while not until.is_set():
            if not server.is_lost:
                await _note(server, found, start)
            await _wait(until, every_s)

    async def disturb() -> None:
        drawn = random.Random(seed)
        while not await _wait(until, drawn.expovariate(1 / mean_s)):
            is_first = time.monotonic() - start < seconds / 3
            (name,) = drawn.choices(list(EVENTS), WEIGHTS_AT_FIRST if is_first else WEIGHTS_LATER)
            try:
                await EVENTS[name](server, drawn)
            except (SoakError, OSError, TimeoutError) as error:
                found.problems.append(f"{name}: {type(error).__name__}: {error}")
                until.set()
                return
            found.events[name] = found.events.get(name, 0) + 1

    async def end() -> None:
        await _wait(until, seconds)
        until.set()

    load = run_mixed_load(
        server.port,
        clients=CLIENTS,
        until=until,
        seed=seed,
        context=CONTEXT,
        deadline_s=HUNG_AFTER_S,
        was_lost=server.was_lost,
    )
    found.load, *_ = await asyncio.gather(load, watch(), disturb(), end())
    found.problems += found.load.problems
    if server.is_lost:
        return found
    if (left := await _left(server.port)) is not None:
        found.problems.append(left)
    await _note(server, found, start)
    found.problems += memory_problems(found.minutes)
    return found


def memory_problems(minutes: Sequence[Minute]) -> list[str]:
    """Return what is wrong with the memory of a soak; nothing can be said of a short one."""
    third = len(minutes) // 3
    if third < 2:
        return []
    before = max(each.memory for each in minutes[third : 2 * third])
    after = max(each.memory for each in minutes[2 * third :])
    growth = (after - before) / _MIB
    if growth <= MOST_GROWTH_MIB:
        return []
    return [f"memory grew by {growth:.0f} MiB from the second third to the last one"]


def table(found: ServingSoak) -> str:
    """Return the tables of a soak in Markdown."""
    lines = ["| minute | anonymous memory, MiB | tokens since the start |", "|---|---|---|"]
    lines += [
        f"| {each.minutes:.0f} | {each.memory / _MIB:.0f} | {each.generated:,} |"
        for each in found.minutes
    ]
    ends = sorted({end for _, end in found.load.ends})
    lines += ["", f"| requests | {' | '.join(ends)} |", "|---" * (len(ends) + 1) + "|"]
    for sort in sorted({sort for sort, _ in found.load.ends}):
        counts = (str(found.load.ends[sort, end] or "") for end in ends)
        lines.append(f"| {sort} | {' | '.join(counts)} |")
    lines.append(f"| all | {' | '.join(str(found.load.of_end(end)) for end in ends)} |")
    events = ", ".join(f"{count} x {name}" for name, count in found.events.items()) or "none"
    total, hung = sum(found.load.ends.values()), found.load.of_end(HUNG)
    return "\n".join([*lines, "", f"{total:,} requests, of which {hung} hung; events: {events}"])


async def _wait(event: asyncio.Event, seconds: float) -> bool:
    """Wait for an event for so long; return whether it has come."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return False
    return True


async def _note(server: Soaked, found: ServingSoak, start: float) -> None:
    async with asyncio.timeout(HUNG_AFTER_S):
        state = (await http_request(server.port, "GET", "/state")).json
    generated = state["engine"]["generated_tokens"]
    minutes = (time.monotonic() - start) / 60
    memory = sum(anonymous_bytes(pid) for pid in server.pids)
    found.minutes.append(Minute(minutes, memory, generated))


async def _left(port: int) -> str | None:
    """Return what a server still holds when nobody asks it for anything; None for nothing."""
    deadline = time.monotonic() + DRAINED_WITHIN_S
    while True:
        engine = (await http_request(port, "GET", "/state")).json["engine"]
        left = {name: engine[name] for name in ("running", "waiting", "used_blocks")}
        if not any(left.values()):
            return None
        if time.monotonic() > deadline:
            return f"the engine still holds {left}"
        await asyncio.sleep(0.2)


def anonymous_bytes(pid: int) -> int:
    """Return the anonymous memory of a process; pages of mapped files are not in it."""
    found = re.search(r"RssAnon:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return 0 if found is None else int(found[1]) * 1024


class _Server:
    """The ranks of a server, which can be started again on the same port."""

    def __init__(self, folder: Path, checkpoint: str, port: int, *, shares: str) -> None:
        self._folder, self._stack = folder, ExitStack()
        self._flags = ["--load", checkpoint, "--port", str(port), "--model-name", "tiny"]
        self._flags += ["--chat-template", "chatml", "--max-requests", str(MAX_REQUESTS)]
        self._flags += ["--request-timeout", str(REQUEST_TIMEOUT_S)]
        self._flags += [SHARES[shares], str(RANKS)]
        self.ranks: list[Started] = []

    def start(self) -> list[int]:
        """End the ranks that are there, start others, and return their processes."""
        self.close()
        job = each_rank(RANKS, self._flags, cwds=[self._folder], program=SERVER, fresh=True)
        self.ranks = self._stack.enter_context(job)
        self.ranks[0].wait_for("serving tiny at ")
        return [rank.process.pid for rank in self.ranks]

    def close(self) -> None:
        """End all ranks."""
        for rank in self.ranks:
            if rank.process.poll() is None:
                rank.process.kill()  # one that is stopped would not hear of another signal
        self._stack.close()


def _trained(place: Path, name: str, seed: int) -> str:
    folder = place / name
    folder.mkdir()
    flags = ["--train-iters", "20", "--save", "save", "--eval-iters", "0", "--log-interval", "100"]
    flags += ["--seq-length", str(CONTEXT), "--seed", str(seed)]
    words = [sys.executable, PRETRAIN, *small_run(byte_corpus(folder), *flags)]
    run = run_program(words, cwd=folder)
    if run.status != 0:
        raise SystemExit(f"the training failed:\n{run.text}")
    return str(folder / "save")


def main(argv: Sequence[str] | None = None) -> None:
    """Soak a server; exit code 1 if a request did not end well or something is left."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--shares", choices=SHARES, default="tensor", help="what ranks have parts of"
    )
    parser.add_argument("--write", action="store_true", help=f"keep the tables in {PAGE.name}")
    flags = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as made:
        place = Path(made)
        checkpoints = tuple(_trained(place, name, seed) for seed, name in enumerate("ab", 1))
        port = free_port()
        with closing(_Server(place, checkpoints[0], port, shares=flags.shares)) as served:
            server = Soaked(port, served.start(), checkpoints, served.start)
            found = asyncio.run(soak(server, seconds=60 * flags.minutes, seed=flags.seed))
            served.ranks[0].process.send_signal(signal.SIGTERM)
            for ended in all_ended(served.ranks):
                if ended.status != 0:
                    found.problems.append(
                        f"a rank ended with {ended.status}:\n{ended.text[-2000:]}"
                    )
    print(table(found) + "\n")
    if flags.write:
        write_between(PAGE, table(found).splitlines(), MARKS)
    print("\n".join(found.problems[:20]) or "every request ended, and nothing is left of them")
    sys.exit(1 if found.problems else 0)


if __name__ == "__main__":
    main()
