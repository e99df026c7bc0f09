"""Times of tokens are measured from the request; test_app.py reads all names."""

from megatron.serving.metrics import JobTimes, TokenRate


def test_the_first_token_and_the_gaps_are_apart() -> None:
    times = iter([1.0, 3.0, 3.5, 4.5, 5.0])
    job = JobTimes(lambda: next(times))
    for _ in range(3):
        job.add_token()
    assert job.first is not None
    assert (job.first - job.start, job.gaps, job.whole) == (2.0, [0.5, 1.0], 4.0)


def test_a_rate_is_that_of_the_last_seconds() -> None:
    now = 0.0
    rate = TokenRate(lambda: now)
    assert rate.rate(10) == 0.0
    now = 2.0
    assert rate.rate(30) == 10.0
    now = 4.0
    assert rate.rate(30) == 5.0
    now = 8.0  # what came before 2.0 no longer counts
    assert rate.rate(30) == 0.0
