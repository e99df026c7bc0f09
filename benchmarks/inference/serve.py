"""Latency of our server at set request rates, beside transformers' two ways to take requests.

`python benchmarks/inference/serve.py`: requests arrive as a Poisson process at each rate, or all at
once (inf), and are sent at their arrival whatever the contestant does. All contestants get the same
arrivals and prompts, in turns, each in a process of its own, and in fp32 have to choose the same
tokens. Times count from the arrival that was drawn. How to read it is in benchmarks/README.md.
"""

import argparse
import asyncio
import importlib.util
import json
import math
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, Any, Protocol, cast

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.inference.decode import DTYPES, SHAPE
from benchmarks.inference.http_client import HttpAnswer, http_request
from benchmarks.inference.open_loop import (
    QUANTILES,
    TimedRequest,
    poisson_arrivals,
    run_open_loop,
    summary,
)
from benchmarks.inference.serve_worker import PEERS, LoadedRequest
from benchmarks.machine import machine
from megatron.errors import MegatronError, NumericsError
from megatron.program import run_program

WORKER = Path(__file__).with_name("serve_worker.py")
OURS = "ours"
_MOST_S = 600.0  # of a start, a request, and a load of a peer
_END_S = 20.0
Tokens = list[list[int] | None]


class Contestant(Protocol):
    """What takes a load."""

    def __call__(self, load: Sequence[LoadedRequest]) -> tuple[list[TimedRequest], Tokens]:
        """Return the times of all requests, and their tokens where they were completed."""


def main(argv: Sequence[str] | None = None) -> None:
    """Measure every rate, print a table, and write it if asked."""
    flags = _parser().parse_args(argv)
    names = [OURS, *PEERS]
    if importlib.util.find_spec("transformers") is None:
        print("transformers is not installed: its rows are left out")
        names = [OURS]
    rows = []
    print(_HEAD)
    with ExitStack() as stack:
        contestants = {name: stack.enter_context(started(name, flags)) for name in names}
        for contestant in contestants.values():  # warm
            contestant(drawn_load(flags, rate=math.inf, seed=0))
        for rate in flags.rate:
            for name, found in measure(contestants, rate, flags).items():
                rows.append({"rate": rate, "contestant": name} | found)
                print(line_of(rows[-1]), flush=True)
    if flags.json is not None:
        report: dict[str, Any] = {"benchmark": "inference/serve", "machine": machine()}
        report |= {name: getattr(flags, name) for name in ("dtype", "layers", "prompt", "new")}
        report |= {"requests": flags.requests, "seeds": flags.seeds, "rows": rows}
        flags.json.write_text(json.dumps(report, indent=1) + "\n")


def drawn_load(flags: argparse.Namespace, *, rate: float, seed: int) -> list[LoadedRequest]:
    """Draw a load: its arrivals, and for each request one of the lengths of prompts and answers."""
    drawn = random.Random(seed)
    arrivals = poisson_arrivals(rate, flags.requests, seed)
    return [
        LoadedRequest(
            arrival,
            tuple(drawn.randrange(SHAPE.vocab) for _ in range(drawn.choice(flags.prompt))),
            drawn.choice(flags.new),
        )
        for arrival in arrivals
    ]


def measure(
    contestants: dict[str, Contestant], rate: float, flags: argparse.Namespace
) -> dict[str, dict[str, float]]:
    """Return the summary of each contestant at a rate, over all seeds.

    Raises:
        NumericsError: contestants that have to choose the same tokens do not.
    """
    loads: dict[str, list[list[TimedRequest]]] = {name: [] for name in contestants}
    for seed in range(1, flags.seeds + 1):
        load, chosen = drawn_load(flags, rate=rate, seed=seed), {}
        names = list(contestants)
        for name in names if seed % 2 else reversed(names):
            times, chosen[name] = contestants[name](load)
            loads[name].append(times)
        if flags.dtype == "fp32":
            check_same_tokens(chosen)
    return {name: summary(found) for name, found in loads.items()}


def check_same_tokens(chosen: dict[str, Tokens]) -> None:
    """Check that all contestants chose the same tokens for requests that they completed."""
    first, *others = chosen
    for name in others:
        for at, (ours, theirs) in enumerate(zip(chosen[first], chosen[name], strict=True)):
            if ours is not None and theirs is not None and ours != theirs:
                raise NumericsError(
                    "contestants choose other tokens, and may not compute the same",
                    found=f"request {at}: {first} {ours}, {name} {theirs}",
                    fix="look for the first token that differs; a near tie would be chance",
                )


@contextmanager
def started(name: str, flags: argparse.Namespace) -> Iterator[Contestant]:
    """Start a contestant in a process of its own, and end it."""
    words = [sys.executable, str(WORKER), name, "--dtype", flags.dtype]
    words += ["--layers", str(flags.layers)]
    environment = os.environ | {"OMP_NUM_THREADS": str(flags.threads)}
    with subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True
    ) as process:
        try:
            word = _next_line(process, lambda line: line.strip().isdigit() or line == "ready\n")
            yield _OurServer(int(word)) if name == OURS else _Peer(process)
        finally:
            cast(IO[str], process.stdin).close()
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                process.kill()


@contextmanager
def killed_after(process: "subprocess.Popen[str]", seconds: float) -> Iterator[None]:
    """Kill a process that takes longer than the block may: reading its output ends then."""
    timer = threading.Timer(seconds, process.kill)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _next_line(process: "subprocess.Popen[str]", is_wanted: Callable[[str], bool]) -> str:
    """Return the next line of a worker that is wanted; libraries may print others."""
    with killed_after(process, _MOST_S):
        for line in cast(IO[str], process.stdout):
            if is_wanted(line):
                return line
    raise WorkerError(
        "a contestant ended without an answer",
        found=f"exit code {process.wait()}, or no answer in {_MOST_S:.0f} s",
        fix="read its messages above",
    )


class WorkerError(MegatronError):
    """A process of the benchmark that does not do its part."""


class _OurServer:
    """Sends loads over HTTP."""

    def __init__(self, port: int) -> None:
        self._port = port

    def __call__(self, load: Sequence[LoadedRequest]) -> tuple[list[TimedRequest], Tokens]:
        tokens: Tokens = [None] * len(load)

        async def send(number: int, arrival: float) -> TimedRequest:
            sent = time.monotonic()
            body = {"prompt": load[number].prompt, "max_tokens": load[number].new}
            body |= {"temperature": 0, "ignore_eos": True, "stream": True}
            data = json.dumps(body).encode()
            answer = HttpAnswer()
            with suppress(TimeoutError):
                async with asyncio.timeout(_MOST_S):
                    answer = await http_request(self._port, "POST", "/v1/completions", data)
            timed, tokens[number] = timed_answer(answer, arrival, sent, load[number].new)
            return timed

        times = asyncio.run(run_open_loop([each.arrival for each in load], send))
        return times, tokens


def timed_answer(
    answer: HttpAnswer, arrival: float, sent: float, new: int
) -> tuple[TimedRequest, list[int] | None]:
    """Return the times of a streamed answer, and its tokens: numbers with spaces between them."""
    if answer.status != 200:
        outcome: Any = "rejected" if answer.status == 429 else "failed"
        return TimedRequest(arrival=arrival, sent=sent, outcome=outcome), None
    *events, (_, last) = answer.events()
    parts = [(came, json.loads(data)["choices"]) for came, data in events]
    texts = [(came, choices[0]["text"]) for came, choices in parts if choices]
    tokens = [int(word) for word in "".join(text for _, text in texts).split()]
    if last != "[DONE]" or len(tokens) != new:
        return TimedRequest(arrival=arrival, sent=sent, outcome="failed"), None
    came = [at for at, text in texts if text]
    times = TimedRequest(
        arrival=arrival, sent=sent, first=came[0], last=came[-1], tokens=len(tokens)
    )
    return times, tokens


class _Peer:
    """Hands loads to a worker, which times itself."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process

    def __call__(self, load: Sequence[LoadedRequest]) -> tuple[list[TimedRequest], Tokens]:
        rows = [(each.arrival, each.prompt, each.new) for each in load]
        loads = cast(IO[str], self._process.stdin)
        loads.write(json.dumps(rows) + "\n")
        loads.flush()
        found = json.loads(_next_line(self._process, lambda line: line.startswith("[{")))
        times = [
            TimedRequest(
                arrival=each.arrival,
                sent=each.arrival,
                first=row["times"][0],
                last=row["times"][-1],
                tokens=len(row["tokens"]),
            )
            for each, row in zip(load, found)
        ]
        return times, [row["tokens"] for row in found]


_NAMES = ("first token", "per token", "whole")
_HEAD = (
    "| requests/s | contestant | completed | 429 | tokens/s | "
    + " | ".join(f"{name} {'/'.join(f'p{q}' for q in QUANTILES)}, ms" for name in _NAMES)
    + " |\n|---|---|---|---|---|---|---|---|"
)


def line_of(row: dict[str, Any]) -> str:
    """Return one measurement as a row of a table in Markdown."""
    times = (
        " / ".join(f"{1000 * row[f'{name} p{percent}']:.0f}" for percent in QUANTILES)
        for name in _NAMES
    )
    rate = "all at once" if math.isinf(row["rate"]) else f"{row['rate']:g}"
    counts = f"{row['completed']:.0f} | {row['rejected']:.0f} | {row['tokens per second']:.1f}"
    return f"| {rate} | {row['contestant']} | {counts} | {' | '.join(times)} |"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="serve", description=__doc__)
    add = parser.add_argument
    add("--rate", type=float, nargs="+", default=[0.5, 1, 2, math.inf], help="[0.5 1 2 inf]")
    add("--requests", type=int, default=40, help="of one load [%(default)s]")
    add("--seeds", type=int, default=3, help="loads at each rate [%(default)s]")
    add("--prompt", type=int, nargs="+", default=[32, 128], help="lengths, one drawn [32 128]")
    add("--new", type=int, nargs="+", default=[16, 48], help="new tokens, one drawn [16 48]")
    add("--dtype", choices=tuple(DTYPES), default="fp32", help="[%(default)s]")
    add("--layers", type=int, default=SHAPE.layers, help="of the model [%(default)s]")
    add("--threads", type=int, default=1, help="of each contestant [%(default)s]")
    add("--json", type=Path, metavar="FILE", help="write the figures there too")
    return parser


if __name__ == "__main__":
    run_program(main)
