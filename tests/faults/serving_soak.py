"""A real server under a mixed load for minutes: every request ends, and nothing is left of it.

`python -m tests.faults.serving_soak --minutes 10` (or `make soak-serving MINUTES=10`) trains a tiny
GPT, serves it, and lets clients send requests of all sorts (`tests/support/serving/mixed_load.py`),
while its process is stopped and goes on now and then. At the end all blocks have to be back and the
server has to stop by itself. Prints tables in Markdown: memory by minutes, and how requests ended.
"""

import argparse
import asyncio
import os
import random
import re
import signal
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.inference.http_client import http_request
from tests.support.launch import PRETRAIN, ROOT, Started, byte_corpus, run_program, small_run
from tests.support.pages import write_between
from tests.support.serving.mixed_load import LoadReport, run_mixed_load

SERVER = str(ROOT / "tools" / "run_text_generation_server.py")
PAGE = ROOT / "docs" / "serving.md"
MARKS = ("<!-- soak: written by `make soak-serving WRITE=1` -->", "<!-- soak: end -->")
CONTEXT = 512  # tokens
CLIENTS = 24
MAX_REQUESTS = 16  # prompts at once: fewer than the clients may send, so that some get 429
REQUEST_TIMEOUT_S = 4  # some requests are longer on purpose
HUNG_AFTER_S = 30.0  # REQUEST_TIMEOUT_S, a stop of the process, and a busy machine
DRAINED_WITHIN_S = 20.0
STOPPED_S = 2.0  # less than the deadline of requests
MEAN_S = 30.0  # between two events
# What memory may grow by from the second third of a soak to the last one. Kernels for new shapes
# are compiled in the first minutes; allocators give pages back late.
MOST_GROWTH_MIB = 24.0

_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Soaked:
    """A server under load, as events see it."""

    pid: int
    port: int


Event = Callable[[Soaked, random.Random], Awaitable[None]]
"""Something that happens to a server or its ranks; returns when it is over."""


async def stop_for_a_while(server: Soaked, drawn: random.Random) -> None:
    """Stop the process and let it go on."""
    os.kill(server.pid, signal.SIGSTOP)
    try:
        await asyncio.sleep(STOPPED_S)
    finally:
        os.kill(server.pid, signal.SIGCONT)


EVENTS: Mapping[str, Event] = {f"SIGSTOP for {STOPPED_S:.0f} s": stop_for_a_while}


@dataclass(frozen=True, slots=True)
class Minute:
    """The state of a server at a time.

    Attributes:
        minutes: since the load began.
        memory: bytes of anonymous memory.
        generated: tokens since the start.
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
            await _note(server, found, start)
            await _wait(until, every_s)

    async def disturb() -> None:
        drawn = random.Random(seed)
        while not await _wait(until, drawn.expovariate(1 / mean_s)):
            name = drawn.choice(list(EVENTS))
            await EVENTS[name](server, drawn)
            found.events[name] = found.events.get(name, 0) + 1

    async def end() -> None:
        await asyncio.sleep(seconds)
        until.set()

    load = run_mixed_load(
        server.port,
        clients=CLIENTS,
        until=until,
        seed=seed,
        context=CONTEXT,
        deadline_s=HUNG_AFTER_S,
    )
    found.load, *_ = await asyncio.gather(load, watch(), disturb(), end())
    found.problems += found.load.problems
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
    lines = ["| minute | anonymous memory, MiB | tokens so far |", "|---|---|---|"]
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
    return "\n".join([*lines, "", f"events: {events}"])


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
    found.minutes.append(Minute(minutes, anonymous_bytes(server.pid), generated))


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


def _trained(place: Path) -> Path:
    flags = ["--train-iters", "20", "--save", "save", "--eval-iters", "0", "--log-interval", "100"]
    flags += ["--seq-length", str(CONTEXT)]
    run = run_program([sys.executable, PRETRAIN, *small_run(byte_corpus(place), *flags)], cwd=place)
    if run.status != 0:
        raise SystemExit(f"the training failed:\n{run.text}")
    return place / "save"


def main(argv: Sequence[str] | None = None) -> None:
    """Soak a server; exit code 1 if a request did not end well or something is left."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--write", action="store_true", help=f"keep the tables in {PAGE.name}")
    flags = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as place:
        words = [sys.executable, SERVER, "--load", str(_trained(Path(place))), "--port", "0"]
        words += ["--chat-template", "chatml", "--model-name", "tiny"]
        words += ["--max-requests", str(MAX_REQUESTS), "--request-timeout", str(REQUEST_TIMEOUT_S)]
        with Started(words, cwd=Path(place), fresh=True) as program:
            program.wait_for("serving tiny at ")
            port = re.search(r"http://[\d.]+:(\d+)", program.text)
            assert port is not None
            server = Soaked(program.process.pid, int(port[1]))
            found = asyncio.run(soak(server, seconds=60 * flags.minutes, seed=flags.seed))
            program.process.send_signal(signal.SIGTERM)
            ended = program.ended()
    if ended.status != 0:
        found.problems.append(f"the server ended with {ended.status}:\n{ended.text[-2000:]}")
    print(table(found) + "\n")
    if flags.write:
        write_between(PAGE, table(found).splitlines(), MARKS)
    print("\n".join(found.problems[:20]) or "every request ended, and nothing is left of them")
    sys.exit(1 if found.problems else 0)


if __name__ == "__main__":
    main()
