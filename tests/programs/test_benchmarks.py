"""The benchmarks run, compare equals, and say what they could not measure."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import gpu_suite
from benchmarks.plain_gpt import PlainGPT, Shape, copy_weights
from benchmarks.train_cpu import TOLERANCE, Contestant, check_equal_work
from megatron.errors import NumericsError

ROOT = Path(__file__).resolve().parents[2]
TINY = (
    *("--layers", "2", "--hidden", "32", "--heads", "2", "--seq-length", "16", "--vocab", "96"),
    *("--micro-batch", "2", "--steps", "3", "--warmup", "1", "--peak-sizes", "64"),
)
TINY_GPT3 = (
    *("--num-layers", "1", "--hidden-size", "32", "--num-attention-heads", "2"),
    *("--seq-length", "16", "--max-position-embeddings", "16"),
)


def script(name: str, *flags: str) -> subprocess.CompletedProcess[str]:
    """Run a benchmark as a user would, on one thread and without any GPU there may be."""
    return subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / name), *flags],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        check=False,
    )


def test_train_cpu_compares_two_models_that_compute_the_same(tmp_path: Path) -> None:
    done = script("train_cpu.py", *TINY, "--json", str(tmp_path / "out" / "result.json"))
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "out" / "result.json").read_text())
    assert {"machine", "shape", "recipe", "flops_convention", "steps", "results"} <= report.keys()
    assert {"cpu", "threads", "torch", "load_1min", "time"} <= report["machine"].keys()
    assert [result["dtype"] for result in report["results"]] == ["fp32", "bf16"]
    for result in report["results"]:
        ours, plain = result["ours"], result["plain"]
        tolerance = TOLERANCE[result["dtype"]]
        assert ours["first_loss"] == pytest.approx(plain["first_loss"], rel=tolerance)
        assert ours["last_loss"] == pytest.approx(plain["last_loss"], rel=10 * tolerance)
        assert ours["first_grad_norm"] == pytest.approx(plain["first_grad_norm"], rel=5e-3)
        assert ours["last_loss"] != ours["first_loss"]
        for score in (ours, plain):
            assert len(score["seconds"]) == 3
            assert score["tokens_per_second"] > 0
            assert score["median_cpu_seconds"] > 0
            work = score["tokens_per_second"] * result["flops_per_token"] / 1e12
            share = work / result["matmul_peak_tflops"]
            assert score["share_of_matmul_peak"] == pytest.approx(share)
        low, high = result["ratio_range"]
        assert low <= result["ratio"] <= high
    assert "ours / plain in tokens/s" in done.stdout


@pytest.mark.parametrize(
    ("losses", "norms", "what"),
    [
        ((6.0, 5.0), (1.0, 1.0), "first loss"),
        ((6.001, 5.0), (1.01, 1.0), "first gradient norm"),
        ((6.001, 5.1), (1.0, 1.0), "last loss"),
        ((float("nan"), 5.0), (1.0, 1.0), "first loss"),
    ],
)
def test_a_comparison_of_unequal_work_is_refused(
    losses: tuple[float, float], norms: tuple[float, float], what: str
) -> None:
    plain = Contestant("plain", lambda text: (0.0, 0.0), losses=[6.001, 5.0], norms=[1.0, 1.0])
    ours = Contestant("ours", lambda text: (0.0, 0.0), losses=list(losses), norms=list(norms))
    with pytest.raises(NumericsError, match=f"do not compute the same {what}"):
        check_equal_work("fp32", ours, plain)
    check_equal_work("fp32", plain, plain)


def test_a_weight_without_a_source_is_an_error_and_not_left_at_random() -> None:
    shape = Shape(layers=1, hidden=8, heads=2, seq_length=4, vocab=11, micro_batch=1)
    with pytest.raises(KeyError, match=r"position\.weight"):
        copy_weights([("embedding.word.weight", torch.zeros(11, 8))], PlainGPT(shape), shape)


def test_the_gpu_suite_says_what_it_did_not_measure_where_there_is_no_gpu(tmp_path: Path) -> None:
    done = script("gpu_suite.py", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    for part in ("tests/gpu", "training gpt3-125m", "training gpt3-1.3b"):
        assert f"not measured: {part} (no CUDA device)" in done.stdout
    (written,) = tmp_path.glob("gpu_suite-*.json")
    report = json.loads(written.read_text())
    assert report["device"] is None
    assert report["trainings"] == []
    assert len(report["not_measured"]) == 3
    assert written.with_suffix(".md").read_text() == done.stdout


def test_the_gpu_suite_measures_a_training_and_where_its_time_goes(tmp_path: Path) -> None:
    found = tmp_path / "measured.json"
    gpu_suite.main(
        [
            *("--measure", "gpt3-125m", "--device", "cpu", "--micro-batch", "2", "--steps", "2"),
            *("--warmup", "1", "--matmul-size", "64", "--peak-tflops", "2", "--json", str(found)),
            *("--", *TINY_GPT3),
        ]
    )
    one = json.loads(found.read_text())
    assert one["steps"] == 2
    assert one["tokens_per_step"] == 32
    assert one["mfu"] == pytest.approx(one["model_tflops"] / 2)
    assert one["profile"]["top"][0]["ms_per_step"] > 0
    tests = {"ok": False, "why": "", "counts": {"passed": 2, "failed": 1}, "seconds": 1.0}
    report: dict[str, Any] = {
        "time": "now",
        "torch": "2",
        "device": "a GPU",
        "flops_convention": "ours",
        "tests": tests | {"failures": ["FAILED tests/gpu/x.py::y"]},
        "trainings": [one],
        "not_measured": [{"part": "training gpt3-1.3b", "why": "out of memory"}],
    }
    text = gpu_suite.markdown(report)
    assert "2 passed, 1 failed" in text
    assert "- FAILED tests/gpu/x.py::y" in text
    assert "of the stated 2 TFLOP/s" in text
    assert "not measured: training gpt3-1.3b (out of memory)" in text


def test_parts_that_fail_or_take_too_long_are_reported_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    endings: list[Any] = [
        SimpleNamespace(returncode=1, stdout="", stderr="Traceback\nOutOfMemoryError: full"),
        subprocess.TimeoutExpired("x", 1.0),
        SimpleNamespace(
            returncode=1,
            stdout="FAILED tests/gpu/a.py::b - c\n1 failed, 14 passed in 9s",
            stderr="",
        ),
        subprocess.TimeoutExpired("x", 1.0),
    ]

    def end(*_: Any, **__: Any) -> Any:
        ending = endings.pop(0)
        if isinstance(ending, BaseException):
            raise ending
        return ending

    monkeypatch.setattr(gpu_suite.subprocess, "run", end)
    one = gpu_suite.TRAININGS[0]
    assert "OutOfMemoryError: full" in gpu_suite._measure_apart(one, None)["why"]
    assert gpu_suite._measure_apart(one, 5.0)["why"] == f"not done within {one.deadline_s:.0f} s"
    tests = gpu_suite._run_tests()
    assert tests["counts"] == {"failed": 1, "passed": 14}
    assert tests["failures"] == ["FAILED tests/gpu/a.py::b - c"]
    assert not tests["ok"]
    assert gpu_suite._run_tests()["why"].startswith("not done within")
