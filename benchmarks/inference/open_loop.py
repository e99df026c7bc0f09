"""An open loop: requests come at times that were drawn before, whatever the server does.

All times count from the arrival that was drawn, never from when a request was sent: a server that
stands still delays all that arrive meanwhile, and a client that waited for it would not see that.
"""

import asyncio
import math
import random
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

QUANTILES = (50, 90, 99)
Outcome = Literal["completed", "rejected", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedRequest:
    """One request of a load, in seconds of one clock.

    Attributes:
        arrival: as drawn.
        sent: when the client began to send it.
        first, last: when its first and its last token came.
        tokens: new ones.
        outcome: rejected: 429; failed: anything else but an answer.
    """

    arrival: float
    sent: float
    first: float = math.inf
    last: float = math.inf
    tokens: int = 0
    outcome: Outcome = "completed"


Send = Callable[[int, float], Awaitable[TimedRequest]]
"""Sends the request of a number that arrives at a time of the monotonic clock."""


def poisson_arrivals(rate: float, count: int, seed: int) -> tuple[float, ...]:
    """Return `count` arrivals at `rate` a second; infinity: all at once."""
    drawn, at = random.Random(seed), 0.0
    gaps = (0.0 if math.isinf(rate) else drawn.expovariate(rate) for _ in range(count))
    return tuple(at := at + gap for gap in gaps)


async def run_open_loop(arrivals: Sequence[float], send: Send) -> list[TimedRequest]:
    """Send each request at its arrival, without waiting for the others, and return their times."""
    start = time.monotonic()

    async def one(number: int, arrival: float) -> TimedRequest:
        await asyncio.sleep(max(0.0, start + arrival - time.monotonic()))
        return await send(number, start + arrival)

    return list(await asyncio.gather(*(one(n, at) for n, at in enumerate(arrivals))))


def quantile(values: Iterable[float], percent: float) -> float:
    """Return the smallest value that so many percent do not exceed; NaN of none."""
    ranked = sorted(values)
    if not ranked:
        return math.nan
    return ranked[max(0, math.ceil(percent / 100 * len(ranked)) - 1)]


def latencies(done: Sequence[TimedRequest]) -> Mapping[str, list[float]]:
    """Return seconds to the first token, for each further token, and to the last one.

    A request that failed counts as one that never ends; one that was rejected is not among them.
    """
    counted = [each for each in done if each.outcome != "rejected"]
    several = [each for each in counted if each.tokens > 1 or each.outcome == "failed"]
    return {
        "first token": [each.first - each.arrival for each in counted],
        "per token": [
            math.inf if each.outcome == "failed" else (each.last - each.first) / (each.tokens - 1)
            for each in several
        ],
        "whole": [each.last - each.arrival for each in counted],
    }


def summary(loads: Sequence[Sequence[TimedRequest]]) -> dict[str, float]:
    """Return counts, quantiles in seconds, and rates of loads that were sent one after another.

    The time of a load is that from its first arrival to the last token of all.
    """
    done = [each for load in loads for each in load]
    completed = [each for each in done if each.outcome == "completed"]
    spent = sum(_seconds(load) for load in loads)
    found: dict[str, float] = {
        outcome: sum(each.outcome == outcome for each in done)
        for outcome in ("completed", "rejected", "failed")
    }
    found["tokens per second"] = sum(each.tokens for each in completed) / spent
    found["requests per second"] = len(completed) / spent
    for name, values in latencies(done).items():
        found |= {f"{name} p{percent}": quantile(values, percent) for percent in QUANTILES}
    found["send lag p99"] = quantile((each.sent - each.arrival for each in done), 99)
    return found


def _seconds(load: Sequence[TimedRequest]) -> float:
    ends = [each.last for each in load if each.outcome == "completed"]
    return max(ends, default=math.inf) - min(each.arrival for each in load)
