"""A server that stops lets what runs finish, in its time, and nothing else begin."""

import asyncio

import pytest

from megatron.serving.admission import Admission
from megatron.serving.api_errors import ApiError
from tests.support.serving.calls import run


def test_places_are_counted_by_prompts_and_free_again() -> None:
    admission = Admission(3)
    with admission.job("a", 2, list):
        refused = pytest.raises(ApiError, match="too many prompts run or wait")
        with refused as caught, admission.job("b", 2, list):
            pass
        assert caught.value.found == "2 of 3, and 2 more"
        with admission.job("c", 1, list):
            assert (admission.prompts, admission.jobs) == (3, 2)
    assert (admission.prompts, admission.jobs) == (0, 0)


@pytest.mark.parametrize(("work_s", "ended"), [(0.01, 0), (30.0, 1)])
def test_a_drain_waits_for_jobs_and_ends_the_rest(work_s: float, ended: int) -> None:
    async def drain() -> int:
        admission, stop = Admission(3), asyncio.Event()

        async def job() -> None:
            with admission.job("a", 1, stop.set):
                try:
                    async with asyncio.timeout(work_s):
                        await stop.wait()
                except TimeoutError:
                    return

        task = asyncio.ensure_future(job())
        await asyncio.sleep(0)
        left = await admission.drain(0.1)
        with pytest.raises(ApiError, match="the server stops"), admission.job("b", 1, list):
            pass
        await task
        return left

    assert run(drain()) == ended
