"""Tests of megatron.optimizer.schedule."""

import math
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from megatron.config.optimizer import DecayStyle, ScheduleConfig, WeightDecayStyle, WsdDecayStyle
from megatron.optimizer.schedule import learning_rate, learning_rate_problems, weight_decay

TOTAL, BATCH, LENGTH = 1000, 10, 32
ROUNDING = 1e-12  # relative; the two sides round a handful of float64 operations differently


def config(style: str = "linear", **fields: Any) -> ScheduleConfig:
    return ScheduleConfig(
        **{"lr": 1.0, "min_lr": 0.1, "lr_decay_style": DecayStyle(style), **fields}
    )


def rate(schedule: ScheduleConfig, samples: int) -> float:
    return learning_rate(
        schedule,
        samples=samples,
        tokens=samples * LENGTH,
        total_samples=TOTAL,
        global_batch_size=BATCH,
    )


def test_the_first_iteration_of_a_warmup_runs_at_its_initial_value() -> None:
    assert rate(config(lr_warmup_iters=10), 0) == 0.0
    assert rate(config(lr_warmup_iters=10, lr_warmup_init=0.25), 0) == 0.25


def test_warmup_is_a_straight_line_to_the_peak() -> None:
    schedule = config(lr_warmup_samples=200, lr_warmup_init=0.2)
    assert [rate(schedule, n) for n in (0, 50, 100, 200)] == pytest.approx([0.2, 0.4, 0.6, 1.0])


@pytest.mark.parametrize("style", list(DecayStyle))
def test_without_warmup_the_first_iteration_runs_at_the_peak(style: DecayStyle) -> None:
    assert rate(config(style, lr_wsd_decay_iters=10), 0) == 1.0


@pytest.mark.parametrize(
    "same",
    [
        {"lr_warmup_iters": 20},
        {"lr_warmup_samples": 200},
        {"lr_warmup_fraction": 0.2},
        {"lr_warmup_fraction": 0.2, "lr_decay_iters": 100},
        {"lr_warmup_iters": 20, "lr_decay_samples": 1000},
        {"lr_warmup_tokens": 200 * LENGTH, "lr_decay_tokens": 1000 * LENGTH},
        {"lr_warmup_fraction": 0.2, "lr_decay_tokens": 1000 * LENGTH},
    ],
)
def test_lengths_mean_the_same_in_every_unit(same: dict[str, Any]) -> None:
    for samples in range(0, 1200, 7):
        assert rate(config("cosine", **same), samples) == pytest.approx(
            rate(config("cosine", lr_warmup_samples=200), samples), rel=ROUNDING
        )


# Peak 1, end 0.1, warm-up over 200 of 1000 samples, WSD decay over the last 400.
GOLDEN = {
    "constant": [0.0, 0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0],
    "linear": [0.0, 0.5, 1.0, 0.775, 0.55, 0.325, 0.1, 0.1],
    "cosine": [0.0, 0.5, 1.0, 0.8681980515339464, 0.55, 0.23180194846605362, 0.1, 0.1],
    "inverse-square-root": [
        0.0,
        0.5,
        1.0,
        math.sqrt(1 / 2),
        math.sqrt(1 / 3),
        0.5,
        math.sqrt(1 / 5),
        0.1,
    ],
    "WSD": [0.0, 0.5, 1.0, 1.0, 1.0, 0.1 + 0.9 * (math.sqrt(2) - 1), 0.1, 0.1],
}


@pytest.mark.parametrize("style", list(GOLDEN))
def test_every_style_has_its_known_values(style: str) -> None:
    schedule = config(style, lr_warmup_iters=20, lr_wsd_decay_iters=40)
    values = [rate(schedule, samples) for samples in (0, 100, 200, 400, 600, 800, 1000, 1200)]
    assert values == pytest.approx(GOLDEN[style], rel=ROUNDING)


@pytest.mark.parametrize(
    ("style", "value"),
    [
        (WsdDecayStyle.LINEAR, 0.75),
        (WsdDecayStyle.COSINE, (1 + math.sqrt(0.5)) / 2),
        (WsdDecayStyle.EXPONENTIAL, 2**0.75 - 1),
        (WsdDecayStyle.MINUS_SQRT, 0.5),
    ],
)
def test_every_wsd_decay_has_its_known_value_a_quarter_in(
    style: WsdDecayStyle, value: float
) -> None:
    schedule = config("WSD", min_lr=0.0, lr_wsd_decay_samples=400, lr_wsd_decay_style=style)
    assert rate(schedule, 700) == pytest.approx(value, rel=ROUNDING)
    assert rate(schedule, 600) == 1.0
    assert rate(schedule, 1000) == pytest.approx(0.0, abs=ROUNDING)


def independent_rate(schedule: ScheduleConfig, now: int, total: int) -> float:
    """The same schedules written down another way: peak, end and the distance still to go."""
    warmup, peak, end = schedule.lr_warmup_samples, schedule.lr, schedule.min_lr
    if now < warmup:
        left = (warmup - now) / warmup
        return left * schedule.lr_warmup_init + (1 - left) * peak
    match schedule.lr_decay_style:
        case DecayStyle.CONSTANT:
            return peak
        case DecayStyle.INVERSE_SQUARE_ROOT:
            if now > total:
                return end
            return max(end, peak * (max(warmup, 1) / max(now, 1)) ** 0.5)
    now = min(now, total)
    if schedule.lr_decay_style is DecayStyle.WSD:
        length = schedule.lr_wsd_decay_samples or 0
        left = min((total - now) / length, 1.0)
        shape: str = schedule.lr_wsd_decay_style
    else:
        left = (total - now) / (total - warmup)
        shape = schedule.lr_decay_style
    share = {
        "linear": left,
        "cosine": math.sin(math.pi / 2 * left) ** 2,
        "exponential": 2**left - 1,
        "minus_sqrt": 1 - (1 - left) ** 0.5,
    }[shape]
    return share * peak + (1 - share) * end


# An inverse square root that has come to its minimum, which few of the drawn ones do.
@example(
    style=DecayStyle.INVERSE_SQUARE_ROOT,
    wsd=WsdDecayStyle.LINEAR,
    peak=1.0,
    shares=(0.5, 0.0),
    warmup=100,
    anneal=1,
    now=900,
)
@given(
    style=st.sampled_from(DecayStyle),
    wsd=st.sampled_from(WsdDecayStyle),
    peak=st.floats(1e-6, 1.0),
    shares=st.tuples(st.floats(0, 1), st.floats(0, 1)),
    warmup=st.integers(0, 400),
    anneal=st.integers(1, 500),
    now=st.integers(0, 1300),
)
def test_the_rate_equals_an_independent_formula_and_stays_in_its_bounds(
    style: DecayStyle,
    wsd: WsdDecayStyle,
    peak: float,
    shares: tuple[float, float],
    warmup: int,
    anneal: int,
    now: int,
) -> None:
    schedule = ScheduleConfig(
        lr=peak,
        min_lr=peak * shares[0],
        lr_decay_style=style,
        lr_warmup_samples=warmup,
        lr_warmup_init=peak * shares[1],
        lr_wsd_decay_samples=anneal,
        lr_wsd_decay_style=wsd,
    )
    value = rate(schedule, now)
    # absolute, in units of the peak: sin^2 and (1 + cos) / 2 part by rounding near zero
    assert value == pytest.approx(independent_rate(schedule, now, TOTAL), abs=1e-9 * peak)
    low = min(schedule.min_lr, schedule.lr_warmup_init)
    assert low * (1 - ROUNDING) <= value <= peak * (1 + ROUNDING)
    if now > warmup:
        assert rate(schedule, now + 1) <= value * (1 + ROUNDING)


def test_a_warmup_as_long_as_the_decay_divides_by_nothing() -> None:
    schedule = config("cosine", lr_warmup_fraction=1.0)
    assert rate(schedule, TOTAL) == 1.0
    assert rate(schedule, TOTAL + 1) == 0.1


def test_a_decay_shorter_than_the_training_stays_at_its_end() -> None:
    schedule = config("cosine", lr_decay_iters=50)
    assert rate(schedule, 500) == pytest.approx(0.1)
    assert rate(schedule, 900) == 0.1


def decay(style: WeightDecayStyle, samples: int) -> float:
    schedule = config(weight_decay_incr_style=style, start_weight_decay=0.1, end_weight_decay=0.5)
    return weight_decay(schedule, 0.01, samples=samples, total_samples=TOTAL)


def test_constant_weight_decay_is_the_optimizers() -> None:
    assert weight_decay(config(), 0.01, samples=77, total_samples=TOTAL) == 0.01


@pytest.mark.parametrize(
    ("style", "quarter"),
    [
        (WeightDecayStyle.LINEAR, 0.2),
        (WeightDecayStyle.COSINE, 0.1 + 0.4 * (1 - math.sqrt(0.5)) / 2),
    ],
)
def test_weight_decay_goes_from_start_to_end(style: WeightDecayStyle, quarter: float) -> None:
    values = [decay(style, samples) for samples in (0, 250, 500, 1000, 1300)]
    assert values == pytest.approx([0.1, quarter, 0.3, 0.5, 0.5], rel=ROUNDING)


def problems(schedule: ScheduleConfig, *, samples_based: bool = False) -> list[str]:
    found = learning_rate_problems(
        schedule, total_samples=TOTAL, global_batch_size=BATCH, samples_based=samples_based
    )
    return [str(problem) for problem in found]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"lr_warmup_iters": 100},
        {"lr_warmup_fraction": 1.0},
        {"lr_decay_iters": 500},
        {"lr_decay_iters": 50, "lr_warmup_iters": 5},
        {"style": "WSD", "lr_wsd_decay_iters": 90, "lr_warmup_iters": 10},
    ],
)
def test_a_sound_schedule_has_no_problems(fields: dict[str, Any]) -> None:
    assert problems(config(**fields)) == []


@pytest.mark.parametrize(
    ("fields", "samples_based", "parts"),
    [
        (
            {"lr_decay_samples": 9},
            False,
            ("in samples but the training is in iters", "use --lr-decay-iters"),
        ),
        (
            {"lr_warmup_samples": 9},
            False,
            ("--lr-warmup-samples 9 with --train-iters", "use --lr-warmup-iters"),
        ),
        (
            {"lr_warmup_iters": 9},
            True,
            ("in iters but the training is in samples", "use --lr-warmup-samples"),
        ),
        (
            {"style": "WSD", "lr_wsd_decay_iters": 9},
            True,
            ("--lr-wsd-decay-iters 9", "use --lr-wsd-decay-samples"),
        ),
        (
            {"lr_warmup_iters": 101},
            False,
            (
                "longer than the decay",
                "warm-up of 101 iters, 100 iters in all",
                "use --lr-warmup-iters 10",
            ),
        ),
        (
            {"lr_warmup_samples": 60, "lr_decay_samples": 50},
            True,
            ("warm-up of 60 samples, 50 samples in all", "use --lr-warmup-samples 5"),
        ),
        ({"style": "constant", "lr_warmup_iters": 101}, False, ("longer than the training",)),
        (
            {"style": "WSD", "lr_wsd_decay_iters": 101},
            False,
            ("overlap", "decay of 101 iters", "use --lr-wsd-decay-iters 100 or less"),
        ),
        (
            {"style": "WSD", "lr_wsd_decay_iters": 50, "lr_warmup_iters": 60},
            False,
            ("overlap", "use --lr-wsd-decay-iters 40 or less"),
        ),
        (
            {"lr_wsd_decay_iters": 5},
            False,
            ("WSD decay length was given for another schedule", "--lr-decay-style linear"),
        ),
    ],
)
def test_what_is_wrong_with_a_schedule_is_said_in_flags(
    fields: dict[str, Any], samples_based: bool, parts: tuple[str, ...]
) -> None:
    (problem,) = problems(config(**fields), samples_based=samples_based)
    for part in parts:
        assert part in problem


def test_a_schedule_in_tokens_looks_at_tokens_alone() -> None:
    schedule = config(lr_warmup_tokens=100, lr_decay_tokens=1100, min_lr=0.0)
    rates = [
        learning_rate(schedule, samples=5, tokens=at, total_samples=7, global_batch_size=1)
        for at in (0, 50, 100, 600, 1100, 5000)
    ]
    assert rates == pytest.approx([0.0, 0.5, 1.0, 0.5, 0.0, 0.0])


def test_a_decay_in_tokens_begins_where_a_warmup_in_samples_or_iterations_ended() -> None:
    for warmup in ({"lr_warmup_samples": 20}, {"lr_warmup_iters": 2}):
        schedule = config(**warmup, lr_decay_tokens=1100, min_lr=0.0)
        rates = [
            learning_rate(
                schedule,
                samples=samples,
                tokens=tokens,
                total_samples=TOTAL,
                global_batch_size=BATCH,
                warmup_tokens=100,
            )
            for samples, tokens in ((0, 0), (10, 30), (20, 100), (30, 350), (60, 1100))
        ]
        assert rates == pytest.approx([0.0, 0.5, 1.0, 0.75, 0.0])


def test_a_warmup_longer_than_its_decay_is_refused_in_tokens_too() -> None:
    schedule = config(lr_warmup_tokens=200, lr_decay_tokens=100)
    (error,) = learning_rate_problems(
        schedule, total_samples=TOTAL, global_batch_size=BATCH, samples_based=False
    )
    assert error.found == "warm-up of 200 tokens, 100 tokens in all"
    assert error.fix == "use --lr-warmup-tokens 10"
