"""The step line and TensorBoard tags that other people's scripts parse, and their numbers."""

import dataclasses
import math
import re
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron import device
from megatron.config.runtime import LoggingConfig
from megatron.engine.base import EvaluationSum, StepPlan, StepReport
from megatron.loop import report as report_module
from megatron.loop.report import PEAK_TFLOPS, StepLog
from megatron.model.specs import TokenFlops
from megatron.progress import BatchSchedule, Duration, Progress
from megatron.trackers.reporting import open_trackers
from tests.support.output import without_times
from tests.unit.trackers.runs import tracked_run

TEN = Duration(BatchSchedule(1, 8, 4), train_iters=10)
# Four replicas have two of the eight samples each: what is counted is the global batch.
PLAN = StepPlan(
    num_microbatches=2,
    global_batch_size=8,
    learning_rate=1.5e-4,
    weight_decay=0.1,
    seq_length=16,
    first_sample=0,
)


def flops(model: int, *, again: float = 0.0) -> TokenFlops:
    return TokenFlops(model, model, round(model * (1 + again)))


def step_log(*, with_length: bool = False, again: float = 0.0, **flags: Any) -> StepLog:
    config = LoggingConfig(**flags)
    return StepLog(
        config,
        TEN,
        flops_per_token=lambda length: flops(10**9 * length // 16, again=again),
        world_size=4,
        with_length=with_length,
        trackers=open_trackers(tracked_run(config)),
    )


def at(iteration: int) -> Progress:
    return Progress(
        iteration=iteration, consumed_samples=8 * iteration, consumed_tokens=128 * iteration
    )


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that the clock shows; a test sets the first."""
    now = [100.0]
    monkeypatch.setattr(report_module.time, "perf_counter", lambda: now[0])
    return now


def test_the_line_is_that_of_megatron(
    capsys: pytest.CaptureFixture[str], clock: list[float]
) -> None:
    log = step_log(log_interval=2, peak_tflops=2.0)
    log._window.started = 100.0
    log.step(at(3), PLAN, StepReport(4.0, 1.23456, loss_scale=65536.0))
    assert capsys.readouterr().out == ""
    clock[0] = 102.0  # after an evaluation
    log.resume_clock()
    clock[0] = 104.0
    log.step(at(4), PLAN, StepReport(3.0, 0.5, loss_scale=65536.0, num_zeros=7), params_norm=9.5)
    short, line = without_times(capsys.readouterr().out).splitlines()
    line, memory = re.sub(r"\d+\.\d\d \|$", "M |", line), re.search(r"(\d+\.\d\d) \|$", line)
    assert memory is not None
    assert float(memory[1]) > 0
    # 2 iterations of 8 samples of 16 tokens in 2 seconds: 128 tokens/s of 1 GFLOP on 4 ranks.
    assert line == (
        " iteration        4/      10 | consumed samples:           32 | "
        "consumed tokens:          512 | elapsed time per iteration (s): 1.00 | "
        "learning rate: 1.500E-04 | global batch size:     8 | lm loss: 3.500000E+00 | "
        "loss scale: 65536.0 | grad norm: 0.500 | num zeros: 7.0 | params norm: 9.500 | "
        "number of skipped iterations:   0 | number of nan iterations:   0 | "
        "samples per second: 8.000 | TFLOPs: 0.03 | tokens per second: 128 | MFU: 1.6% | "
        "memory (GiB): M |"
    )
    # 6 iterations of 1 second are left
    assert short == (
        "step 4/10 | lm loss 3.5 | lr 0.00015 | grad norm 0.5 | 128 tokens/s | 0:00:06 to go"
    )


def test_what_is_recomputed_counts_for_the_hardware_alone(
    capsys: pytest.CaptureFixture[str], clock: list[float]
) -> None:
    for again, shown in ((0.0, ""), (1 / 3, " | HFU: 2.1%")):
        log = step_log(log_interval=1, peak_tflops=2.0, again=again)
        log._window.started, clock[0] = 100.0, 101.0
        log.step(at(1), PLAN, StepReport(4.0, 1.0))
        assert f"MFU: 1.6%{shown} | memory" in capsys.readouterr().out


def test_the_short_line_fits_160_columns_and_has_no_words_of_megatrons(
    capsys: pytest.CaptureFixture[str], clock: list[float]
) -> None:
    log = StepLog(
        LoggingConfig(log_interval=1),
        Duration(BatchSchedule(1, 8, 1), train_iters=9_000_000),
        flops_per_token=lambda _: flops(1),
        world_size=1,
        losses=("lm loss", "sop loss"),
    )
    log._window.started, clock[0] = 100.0, 100.9
    plan = dataclasses.replace(PLAN, learning_rate=1.23456e-15, seq_length=131072)
    losses = StepReport(1.0, 1.23456e-12, means=(1.23456e-12, 1.23456e12))
    log.step(at(1_234_567), plan, losses)
    short, line, _ = capsys.readouterr().out.split("\n")
    assert 150 < len(short) <= 160
    names = [part.partition(":")[0] for part in line.split(" | ")]
    assert not [name for name in names if f"{name}:" in short]
    assert "iteration " not in short


def test_it_speaks_at_the_first_at_intervals_and_at_the_end(
    capsys: pytest.CaptureFixture[str],
) -> None:
    log = step_log(log_interval=4)
    for iteration in range(1, 11):
        log.step(at(iteration), PLAN, StepReport(2.0, 1.0))
    printed = re.findall(r"iteration +(\d+)/", capsys.readouterr().out)
    assert printed == ["1", "4", "8", "10"]


def test_losses_that_are_not_numbers_are_counted_and_left_out(
    capsys: pytest.CaptureFixture[str],
) -> None:
    log = step_log(log_interval=2)
    log.step(at(3), PLAN, StepReport(math.nan, math.nan, skipped=True))
    log.step(at(4), PLAN, StepReport(2.0, 1.0))
    line = capsys.readouterr().out
    assert "lm loss: 2.000000E+00" in line
    assert "skipped iterations:   1 | number of nan iterations:   1 |" in line
    log.step(at(10), PLAN, StepReport(math.nan, math.nan, skipped=True))
    assert "lm loss" not in capsys.readouterr().out


def test_without_a_known_peak_there_is_no_mfu(capsys: pytest.CaptureFixture[str]) -> None:
    step_log().step(at(1), PLAN, StepReport(2.0, 1.0))
    assert "MFU" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", PEAK_TFLOPS["H100"]),
        ("NVIDIA H100 PCIe", PEAK_TFLOPS["H100 PCIe"]),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("cpu (2 cores, 1 threads)", None),
    ],
)
def test_the_peak_follows_the_device(
    monkeypatch: pytest.MonkeyPatch, name: str, peak: float | None
) -> None:
    monkeypatch.setattr(device, "name", lambda: name)
    assert step_log()._peak == peak


def test_under_a_curriculum_the_length_is_said_and_counted(
    capsys: pytest.CaptureFixture[str], clock: list[float], tmp_path: Path
) -> None:
    with step_log(
        with_length=True, log_interval=2, peak_tflops=2.0, tensorboard_dir=str(tmp_path)
    ) as log:
        log._window.started = 100.0
        log.step(at(3), dataclasses.replace(PLAN, seq_length=4), StepReport(4.0, 1.0))
        clock[0] = 102.0
        log.step(at(4), dataclasses.replace(PLAN, seq_length=12), StepReport(3.0, 1.0))
    line = capsys.readouterr().out
    assert "| curriculum seqlen:    12 | number of skipped iterations:" in line
    # 8 samples of 4 and 8 of 12 tokens in 2 seconds, of 1/4 and 3/4 GFLOP each, on 4 ranks.
    assert "tokens per second: 64 |" in line
    assert f"MFU: {100 * (8 * 4 / 4 + 8 * 12 * 3 / 4) * 1e9 / 2 / 4 / 2e12:.1f}%" in line
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [(e.step, e.value) for e in events.Scalars("curriculum_seqlen")] == [(3, 4), (4, 12)]


def test_losses_without_a_value_of_their_own_are_said_where_there_are_some(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with step_log(tensorboard_dir=str(tmp_path), log_interval=1) as log:
        loads = {"most_loaded_expert": 1.5, "idle_experts": 2, "dropped_tokens": 0.0125}
        log.step(at(1), PLAN, StepReport(4.0, 1.0, load_balancing_loss=1.25, z_loss=9.5, **loads))
        words = "| grad norm: 1.000 | load_balancing_loss: 1.250000E+00 | most loaded expert: 1.50 "
        words += "| idle experts: 2 | dropped tokens: 1.25% | z_loss: 9.500000E+00 |"
        assert words in capsys.readouterr().out
        log.step(at(2), PLAN, StepReport(4.0, 1.0))
        line = capsys.readouterr().out
        assert "load_balancing_loss" not in line
        assert "z_loss" not in line
        assert "expert" not in line
    events = EventAccumulator(str(tmp_path)).Reload()
    for tag, value in (("load-balancing-loss", 1.25), ("z-loss", 9.5)):
        assert [(e.step, e.value) for e in events.Scalars(f"{tag}/{tag}")] == [(1, value)]


def test_an_evaluation_is_framed_by_dashes(capsys: pytest.CaptureFixture[str]) -> None:
    step_log().evaluation("validation", EvaluationSum(20.0, 10), at(5))
    short, dashes, words, again, _ = without_times(capsys.readouterr().out).split("\n")
    assert short == "validation after 5 steps | lm loss 2"
    assert words == (
        " validation loss at iteration 5 | lm loss value: 2.000000E+00 | "
        "lm loss PPL: 7.389056E+00 | tokens: 10 |"
    )
    assert dashes == again == "-" * len(words)


def test_an_evaluation_has_the_metrics_of_its_task(capsys: pytest.CaptureFixture[str]) -> None:
    result = EvaluationSum(20.0, 10, metrics=(("accuracy", 0.25),))
    step_log().evaluation("validation", result, at(5))
    short, _, words, *_ = without_times(capsys.readouterr().out).split("\n")
    assert short == "validation after 5 steps | lm loss 2 | accuracy 0.2500"
    assert words.endswith("lm loss PPL: 7.389056E+00 | accuracy: 0.2500 | tokens: 10 |")


def test_tensorboard_has_the_tags_of_megatron(tmp_path: Path) -> None:
    flags = {
        name: True
        for name in LoggingConfig.__dataclass_fields__
        if name.endswith("_to_tensorboard")
    }
    with step_log(tensorboard_dir=str(tmp_path), log_interval=1, peak_tflops=1.0, **flags) as log:
        log.step(at(1), PLAN, StepReport(4.0, 1.0, num_zeros=3), params_norm=2.0)
        log.evaluation("validation", EvaluationSum(20.0, 10), at(1))
    events = EventAccumulator(str(tmp_path)).Reload()
    tags = set(events.Tags()["scalars"])
    per_step = {
        "learning-rate/learning-rate",
        "batch-size/batch-size",
        "lm-loss-training/lm loss",
        "loss-scale/loss-scale",
        "grad-norm/grad-norm",
        "num-zeros/num-zeros",
        "params-norm/params-norm",
        "memory/allocated-bytes",
        "memory/peak-bytes",
        "memory/peak-host-bytes-with-workers",
    }
    validation = "lm-loss-validation/validation/lm loss validation"
    assert tags == {
        "steps-vs-samples/y=steps,x=samples",
        "steps-vs-samples/y=samples,x=steps",
        "steps-vs-tokens/y=steps,x=tokens",
        "steps-vs-tokens/y=tokens,x=steps",
        *per_step,
        *(f"{tag} vs samples" for tag in per_step),
        "learning-rate/learning-rate vs tokens",
        "lm-loss-training/lm loss vs tokens",
        "iteration-time/iteration-time",
        "iteration-time/iteration-time vs samples",
        "iteration-time/samples per second",
        "iteration-time/tokens per second",
        "iteration-time/TFLOPs per gpu (estimated)",
        "iteration-time/MFU",
        "iteration-time/world_size",
        validation,
        f"{validation} vs samples",
        f"{validation} vs tokens",
        f"{validation} ppl",
        f"{validation} ppl vs samples",
    }
    assert events.Tags()["tensors"] == ["flags/text_summary"]
    loss = events.Scalars("lm-loss-training/lm loss vs tokens")[0]
    assert (loss.step, loss.value) == (128, 4.0)


def test_each_of_several_losses_has_a_name(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    config = LoggingConfig(log_interval=2, tensorboard_dir=str(tmp_path))
    log = StepLog(
        config,
        TEN,
        flops_per_token=lambda _: flops(10**9),
        world_size=1,
        losses=("lm loss", "sop loss"),
        trackers=open_trackers(tracked_run(config)),
    )
    with log:
        log.step(at(3), PLAN, StepReport(5.0, 1.0, means=(4.0, 1.0)))
        log.step(at(4), PLAN, StepReport(3.0, 1.0, means=(2.5, 0.5)))
        log.evaluation("validation", EvaluationSum(6.0, 2, (EvaluationSum(1.0, 4),)), at(4))
    output = capsys.readouterr().out
    assert "lm loss: 3.250000E+00 | sop loss: 7.500000E-01 |" in output
    assert "lm loss value: 3.000000E+00" in output
    assert "sop loss value: 2.500000E-01 | sop loss PPL: 1.284025E+00 | tokens: 2 |" in output
    events = EventAccumulator(str(tmp_path)).Reload()
    tags = set(events.Tags()["scalars"])
    assert {
        "lm-loss-training/sop loss",
        "lm-loss-validation/validation/sop loss validation",
    } <= tags
    assert [event.value for event in events.Scalars("lm-loss-training/sop loss")] == [1.0, 0.5]
