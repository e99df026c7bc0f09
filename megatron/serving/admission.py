"""Which requests are let in: not too many at once, and none while the server stops."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from megatron.serving.api_errors import ApiError, ErrorCode

_RETRY_S = 1  # a queue that is full has a free place again within seconds


class Admission:
    """Counts the prompts that run or wait, and ends all of them when the time is over.

    Attributes:
        is_draining: whether the server stops: what runs goes on, nothing else begins.
        prompts: of all jobs that were let in and have not ended.
    """

    def __init__(self, max_requests: int) -> None:
        self.is_draining = False
        self.prompts = 0
        self._most = max_requests
        self._jobs: dict[str, Callable[[], None]] = {}
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def jobs(self) -> int:
        """Jobs that were let in and have not ended."""
        return len(self._jobs)

    @contextmanager
    def job(self, name: str, prompts: int, end: Callable[[], None]) -> Iterator[None]:
        """Let a job in for as long as the context lasts; `end` ends it early.

        Raises:
            ApiError: too many prompts run or wait, or the server stops.
        """
        if self.is_draining:
            raise stopping()
        if self.prompts + prompts > self._most:
            raise ApiError(
                ErrorCode.QUEUE_FULL,
                "too many prompts run or wait",
                found=f"{self.prompts} of {self._most}, and {prompts} more",
                fix="send the same request again later",
                retry_after_s=_RETRY_S,
            )
        self.prompts += prompts
        self._jobs[name] = end
        self._idle.clear()
        try:
            yield
        finally:
            self.prompts -= prompts
            del self._jobs[name]
            if not self._jobs:
                self._idle.set()

    async def drain(self, timeout_s: float) -> int:
        """Let nothing in any more, wait for what runs, end the rest; return how many were ended."""
        self.is_draining = True
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            pass
        rest = list(self._jobs.values())
        for end in rest:
            end()
        return len(rest)


def stopping() -> ApiError:
    """Return the answer to a request that comes while the server stops."""
    return ApiError(
        ErrorCode.DRAINING,
        "the server stops and takes no more requests",
        fix="send the request to another server, or later",
        retry_after_s=_RETRY_S,
    )
