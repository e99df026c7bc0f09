"""The benchmarks run, compare equals, and report what they could not measure."""

import json
import multiprocessing as mp
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from benchmarks import (
    data,
    data_preprocess,
    data_sections,
    data_turns,
    data_worker,
    gpu_suite,
    head_loss,
    ops,
    parallel_cpu,
    pipeline_bubble,
    train_cpu,
)
from benchmarks.peers import packages
from benchmarks.peers.plain_gpt import (
    LlamaShape,
    PlainGPT,
    PlainTrainer,
    Recipe,
    Shape,
    copy_weights,
    q_k_v,
)
from benchmarks.train_cpu import TOLERANCE, Contestant, check_equal_work
from megatron import device
from megatron.config.fp8 import Fp8Recipe
from megatron.errors import ConfigError, NumericsError
from megatron.ops import library
from tests.support.call import Call
from tests.support.launch import Ended, run_program

ROOT = Path(__file__).resolve().parents[3]
TINY = (
    *("--layers", "2", "--hidden", "32", "--heads", "2", "--seq-length", "16", "--vocab", "96"),
    *("--micro-batch", "2", "--steps", "3", "--warmup", "1", "--peak-sizes", "64"),
)
TINY_LLAMA = (*TINY, "--shape", "llama", "--heads", "4", "--groups", "2", "--ffn", "48")
TINY_GPT3 = (
    *("--num-layers", "1", "--hidden-size", "32", "--num-attention-heads", "2"),
    *("--seq-length", "16", "--max-position-embeddings", "16"),
)


def script(name: str, *flags: str) -> Ended:
    """Run a benchmark as a user would, on one thread and without any GPU there may be."""
    words = [sys.executable, str(ROOT / "benchmarks" / name), *flags]
    return run_program(words, cwd=ROOT, warm_children=True)


def test_train_cpu_compares_two_models_that_compute_the_same(tmp_path: Path) -> None:
    to = str(tmp_path / "out" / "result.json")
    done = script("train_cpu.py", *TINY, "--dtype", "bf16", "--json", to)
    assert done.status == 0, done.err
    report = json.loads((tmp_path / "out" / "result.json").read_text())
    assert {"machine", "shape", "recipe", "flops_convention", "steps", "results"} <= report.keys()
    assert {"cpu", "threads", "torch", "load_1min", "time"} <= report["machine"].keys()
    assert [result["dtype"] for result in report["results"]] == ["bf16"]
    for result in report["results"]:
        ours, plain = (result["scores"][who] for who in ("ours", "plain"))
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
        for memory in result["peak_memory"].values():
            assert memory["peak"] > memory["imports"] > 0
        (beside,) = result["beside"].values()
        low, high = beside["range"]
        assert low <= beside["ratio"] <= high
    assert "ours / plain in tokens/s" in done.out


@pytest.mark.wide  # compiles a model
@pytest.mark.parametrize("shape", [TINY, TINY_LLAMA], ids=["gpt2", "llama"])
def test_train_cpu_has_peers_that_compute_the_same(tmp_path: Path, shape: tuple[str, ...]) -> None:
    flags = ("--peers", "--dtype", "fp32", "--json", str(tmp_path / "result.json"))
    done = script("train_cpu.py", *shape, *flags)
    assert done.status == 0, done.err
    (result,) = json.loads((tmp_path / "result.json").read_text())["results"]
    assert [*result["scores"]] == ["ours", "plain", "compiled", "transformers"]
    assert [*result["beside"]] == ["plain", "compiled", "transformers"]


@pytest.mark.wide
def test_train_cpu_compares_a_llama_with_plain_layers(tmp_path: Path) -> None:
    to = str(tmp_path / "result.json")
    # As many positions as make a wrong angle a wrong loss.
    flags = ("--dtype", "fp32", "--seq-length", "128", "--steps", "1", "--json", to)
    done = script("train_cpu.py", *TINY_LLAMA, *flags)
    assert done.status == 0, done.err
    report = json.loads(Path(to).read_text())
    assert report["network"] == "llama"
    assert {"groups": 2, "ffn": 48}.items() <= report["shape"].items()
    assert [*report["results"][0]["scores"]] == ["ours", "plain"]


def shape_of(*flags: str) -> Shape:
    return train_cpu.shape_of(train_cpu._parser().parse_args([*flags]))


def test_flags_change_the_sizes_of_a_shape() -> None:
    assert shape_of() == train_cpu.SHAPES["gpt2"]
    llama = train_cpu.SHAPES["llama"]
    assert isinstance(llama, LlamaShape)
    assert shape_of("--shape", "llama", "--ffn", "64") == replace(llama, ffn=64)
    with pytest.raises(ConfigError, match="the shape gpt2 has no such sizes") as caught:
        shape_of("--groups", "2", "--layers", "3")
    assert caught.value.found == "--groups 2"


def llama_weights(shape: LlamaShape) -> dict[str, torch.Tensor]:
    """Random weights of a LLaMA under our names."""
    h, drawn = shape.hidden, torch.Generator().manual_seed(1)
    sizes: dict[str, tuple[int, ...]] = {
        "embedding.word.weight": (shape.vocab, h),
        "final_norm.weight": (h,),
        "output.weight": (shape.vocab, h),
    }
    of_layer: dict[str, tuple[int, ...]] = {
        "input_norm.weight": (h,),
        "attention.qkv.weight": ((shape.heads + 2 * shape.groups) * h // shape.heads, h),
        "attention.output.weight": (h, h),
        "post_attention_norm.weight": (h,),
        "mlp.fc1.weight": (2 * shape.ffn, h),
        "mlp.fc2.weight": (h, shape.ffn),
    }
    for layer in range(shape.layers):
        sizes |= {f"layers.{layer}.{name}": size for name, size in of_layer.items()}
    return {name: 0.3 * torch.randn(size, generator=drawn) for name, size in sizes.items()}


def test_transformers_llama_computes_what_the_plain_one_does() -> None:
    shape = shape_of(*TINY_LLAMA, "--seq-length", "128")
    assert isinstance(shape, LlamaShape)
    weights, text = llama_weights(shape), train_cpu._tokens(shape, 0)

    def first_step(maker: packages.Maker) -> tuple[float, float]:
        peer = maker(weights.items(), shape)
        return PlainTrainer(peer.model, Recipe(), loss=peer.loss).step(text)

    def keys_and_values_swapped(shape: Shape, value: torch.Tensor) -> tuple[torch.Tensor, ...]:
        q, k, v = q_k_v(shape, value)
        return q, v, k

    expected = first_step(packages.plain)
    # fp32, in another order of additions.
    assert first_step(packages.transformers) == pytest.approx(expected, rel=TOLERANCE["fp32"])
    with patch.object(packages, "q_k_v", keys_and_values_swapped):
        assert first_step(packages.transformers) != pytest.approx(expected, rel=1e-3)


def test_a_folder_without_megatron_core_is_refused(tmp_path: Path) -> None:
    done = script("train_cpu.py", *TINY, "--peers", "--megatron-core", str(tmp_path))
    assert done.status == ConfigError.exit_code
    assert "there is no megatron-core in this folder" in done.err


def test_the_benchmark_of_the_head_compares_ways_to_compute_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ("--tokens", "64", "--hidden", "8", "--vocab", "96", "--rounds", "2", "--warmup", "0")
    sizes += ("--dtype", "bf16", "--chunk-tokens", "16")
    head_loss.main([*sizes, "--json", str(tmp_path / "result.json")])
    report = json.loads((tmp_path / "result.json").read_text())
    assert [result["dtype"] for result in report["results"]] == ["bf16"]
    for result in report["results"]:
        names = [row["who"] for row in result["rows"]]
        assert names == ["plain", "separate", "fused", "fused, 16 tokens", "products"]
        assert all(len(row["seconds"]) == 2 for row in result["rows"])
        assert result["rows"][0]["ratio"] == 1.0
    assert "plain / it" in capsys.readouterr().out


def test_a_head_that_computes_another_loss_is_refused() -> None:
    flags = SimpleNamespace(tokens=8, hidden=4, vocab=12)
    inputs = head_loss.make_inputs(torch.float32, flags)

    def half(inputs: head_loss.Inputs) -> torch.Tensor:
        return head_loss.plain_loss(head_loss.Inputs(*inputs[:2], inputs.labels // 2))

    pair = [head_loss.contestant("plain", head_loss.plain_loss), head_loss.contestant("half", half)]
    head_loss.check_equal_work("fp32", pair[:1], inputs)
    with pytest.raises(NumericsError, match="the contestants do not compute the same loss"):
        head_loss.check_equal_work("fp32", pair, inputs)


def test_parallel_cpu_compares_ranks_with_one_process_and_counts_bytes(tmp_path: Path) -> None:
    done = script("parallel_cpu.py", "--quick", "--json", str(tmp_path / "out" / "result.json"))
    assert done.status == 0, done.err
    report = json.loads((tmp_path / "out" / "result.json").read_text())
    rows = {row["who"]: row for row in report["rows"]}
    assert set(parallel_cpu.OURS) < rows.keys()
    first = rows[parallel_cpu.PLAIN_ALONE]["turns"][0]["losses"]
    for row in rows.values():
        assert len(row["turns"]) == report["rounds"] == 2
        assert row["turns"][0]["losses"] == pytest.approx(first, rel=10 * TOLERANCE["fp32"])
        assert row["cpu"] > 0
    assert report["efficiency"].keys() == {*parallel_cpu.OURS, parallel_cpu.DDP}
    assert min(report["beside_ddp"].values()) > 0
    for who in parallel_cpu.OURS:
        sent = report["bytes"][who]
        # What is more than the formula: the loss, the norm, and the padding of buckets.
        assert 1.0 <= sent["counted"] / sent["formula"] < 1.05
    for target in ("efficiency of ours over DDP's own", "efficiency of ours, overlap over DDP's"):
        assert f"target >= 0.95: {target}" in done.out


def test_a_ring_sends_two_halves_of_an_all_reduce() -> None:
    both = [parallel_cpu.ring_bytes(kind, 120.0, 4) for kind in ("reduce-scatter", "all-gather")]
    assert sum(both) == parallel_cpu.ring_bytes("all-reduce", 120.0, 4) == 180.0


def test_an_overlap_that_changes_a_bit_is_refused() -> None:
    def rows(changed: float) -> list[data_turns.Row]:
        losses = {who: 6.0 for who in ("ours", parallel_cpu.PLAIN_ALONE)}
        losses["ours, overlap"] = 6.0 + changed
        turns = {who: {"losses": [loss], "norms": [1.0]} for who, loss in losses.items()}
        return [data_turns.Row(who, 1, "tokens", [turn]) for who, turn in turns.items()]

    warm = {row.who: row.turns[0] for row in rows(0.0)}
    parallel_cpu.check_all_equal(rows(0.0), warm)
    with pytest.raises(NumericsError, match="overlapping the sum of gradients changes results"):
        parallel_cpu.check_all_equal(rows(1e-7), warm)
    with pytest.raises(NumericsError, match="do not compute the same last loss"):
        parallel_cpu.check_all_equal(rows(1e-2), warm)


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
    plain = Contestant("plain", losses=[6.001, 5.0], norms=[1.0, 1.0])
    ours = Contestant("ours", losses=list(losses), norms=list(norms))
    with pytest.raises(NumericsError, match=f"do not compute the same {what}"):
        check_equal_work("fp32", ours, plain)
    check_equal_work("fp32", plain, plain)


def test_a_weight_without_a_source_is_an_error_and_not_left_at_random() -> None:
    shape = Shape(layers=1, hidden=8, heads=2, seq_length=4, vocab=11, micro_batch=1)
    with pytest.raises(KeyError, match=r"position\.weight"):
        copy_weights([("embedding.word.weight", torch.zeros(11, 8))], PlainGPT(shape), shape)


def test_the_gpu_suite_says_what_it_did_not_measure_where_there_is_no_gpu(tmp_path: Path) -> None:
    done = script("gpu_suite.py", "--out", str(tmp_path))
    assert done.status == 0, done.err
    names = [one.name for one in gpu_suite.TRAININGS]
    assert "training gpt3-1.3b, FP8 tensorwise" in names
    assert "training 8 layers of llama-7b, bf16" in names
    assert "training gpt3-125m a sample at a time, bf16 as a CUDA graph" in names
    assert len(set(names)) == len(names)
    for part in ("tests/gpu", "operators", *names):
        assert f"not measured: {part} (no CUDA device)" in done.out
    (written,) = tmp_path.glob("gpu_suite-*.json")
    report = json.loads(written.read_text())
    assert report["device"] is None
    assert report["trainings"] == []
    assert len(report["not_measured"]) == 2 + len(names)
    assert written.with_suffix(".md").read_text() == done.out


def measured_on_cpu(folder: Path, *flags: str) -> dict[str, Any]:
    """What the suite measures of a tiny training in this process."""
    found = folder / "measured.json"
    gpu_suite.main(
        [
            *("--measure", "gpt3-125m", "--device", "cpu", "--micro-batch", "2", "--steps", "2"),
            *("--warmup", "1", "--matmul-size", "64", "--peak-tflops", "2", "--json", str(found)),
            *("--", *TINY_GPT3, *flags),
        ]
    )
    measured: dict[str, Any] = json.loads(found.read_text())
    return measured


def a_report(**parts: Any) -> dict[str, Any]:
    nothing = {"tests": None, "operators": None, "trainings": [], "not_measured": []}
    named = {"time": "now", "torch": "2", "device": "a GPU", "flops_convention": "ours"}
    return {**named, **nothing, **parts}


def test_the_gpu_suite_measures_a_training_and_where_its_time_goes(tmp_path: Path) -> None:
    one = measured_on_cpu(tmp_path)
    assert one["steps"] == 2
    assert one["tokens_per_step"] == 32
    assert one["mfu"] == pytest.approx(one["model_tflops"] / 2)
    assert one["profile"]["top"][0]["ms_per_step"] > 0
    parts = one["estimated_bytes"]
    assert parts["weights"] == pytest.approx(2 * one["parameters"], rel=0.01)
    assert one["estimated_memory_gib"] == pytest.approx(sum(parts.values()) / 2**30)
    tests = {"ok": False, "why": "", "counts": {"passed": 2, "failed": 1}, "seconds": 1.0}
    text = gpu_suite.markdown(
        a_report(
            tests=tests | {"failures": ["FAILED tests/gpu/x.py::y"]},
            trainings=[one],
            not_measured=[{"part": "training gpt3-1.3b", "why": "out of memory"}],
        )
    )
    assert "2 passed, 1 failed" in text
    assert "- FAILED tests/gpu/x.py::y" in text
    assert "of the stated 2 TFLOP/s;" in text
    assert "not measured: training gpt3-1.3b (out of memory)" in text


def test_a_training_in_fp8_stands_beside_the_same_in_bf16(tmp_path: Path) -> None:
    rowwise = gpu_suite.Training("gpt3-125m", 2, 2, Fp8Recipe.ROWWISE)
    assert rowwise.name == "training gpt3-125m, FP8 rowwise"
    one = measured_on_cpu(tmp_path, *rowwise.flags) | {"part": rowwise.name}
    assert one["precision"] == "FP8 rowwise"
    base = one | {"precision": "bf16", "part": "training gpt3-125m, bf16"}
    base["median_step_s"] = 1.5 * one["median_step_s"]
    text = gpu_suite.markdown(a_report(trainings=[base, one]))
    (row,) = (line for line in text.splitlines() if line.startswith("| gpt3-125m, FP8 rowwise"))
    assert " | 1.50 | " in row
    assert row.endswith(f"| {one['estimated_memory_gib']:.1f} |")
    assert "of the stated 2 TFLOP/s of bf16;" in text


def test_a_training_as_a_graph_stands_beside_the_same_without(tmp_path: Path) -> None:
    graph = gpu_suite.Training("gpt3-125m", 1, 2, graph=True)
    one = measured_on_cpu(tmp_path, *graph.flags) | {"part": graph.name}
    assert one["precision"] == "bf16 as a CUDA graph"
    base = one | {"precision": "bf16", "part": "training gpt3-125m a sample at a time, bf16"}
    base["median_step_s"] = 1.25 * one["median_step_s"]
    text = gpu_suite.markdown(a_report(trainings=[base, one]))
    (row,) = (line for line in text.splitlines() if "as a CUDA graph |" in line)
    assert " | 1.25 | " in row
    assert "TFLOP/s of bf16" not in text


def test_layers_of_a_large_model_and_what_a_device_cannot_do_have_their_names() -> None:
    few = gpu_suite.Training("llama-7b", 8, 12, Fp8Recipe.ROWWISE, layers=8)
    assert few.name == "training 8 layers of llama-7b, FP8 rowwise"
    assert few.flags[:2] == ("--num-layers", "8")
    (named,) = {gpu_suite._why_not(few, (8, 9))["part"]}
    assert named == few.name
    assert "compute capability 8.9" in gpu_suite._why_not(few, (8, 9))["why"]
    assert gpu_suite._why_not(few, (9, 0)) == {}
    tensorwise = gpu_suite.Training("llama-7b", 8, 12, Fp8Recipe.TENSORWISE, layers=8)
    assert gpu_suite._why_not(tensorwise, (8, 9)) == {}


@pytest.mark.wide
def test_operators_are_measured_beside_compiled_ones(tmp_path: Path) -> None:
    found = tmp_path / "ops.json"
    ops.main(
        [
            *("--rows", "4", "--widths", "192", "256", "--dtypes", "fp32"),
            *("--rounds", "2", "--compiled", "--json", str(found)),
        ]
    )
    rows = json.loads(found.read_text())["results"]
    assert {"forward", "backward", "update"} == {row["pass"] for row in rows}
    assert all(row["operator"] == "adamw" or row["compiled_us"] > 0 for row in rows)


def test_the_suite_ends_in_time_and_lists_what_it_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    operators = tmp_path / "ops.json"
    monkeypatch.setattr(library, "INSTRUCTION_SET", library.INSTRUCTION_SET or "plain")
    ops.main(["--rows", "4", "--widths", "192", "--rounds", "1", "--json", str(operators)])
    now, limits = [0.0], list[float]()

    def run(command: list[str], *, timeout: float, **_: Any) -> Any:
        limits.append(timeout)
        if "pytest" in command:
            now[0] += 150.0
            return SimpleNamespace(returncode=0, stdout="3 passed in 9s", stderr="")
        now[0] += 70.0
        to = Path(command[command.index("--json") + 1])
        if "--compiled" in command:
            return SimpleNamespace(returncode=1, stdout="", stderr="no compiler")
        to.write_text(operators.read_text() if "--measure" not in command else "{}")
        return SimpleNamespace(returncode=0, stdout="", stderr="")

    monkeypatch.setattr(gpu_suite.subprocess, "run", run)
    monkeypatch.setattr(gpu_suite.time, "monotonic", lambda: now[0])
    for name, value in {"cuda_is_available": True, "name": "a GPU", "capability": (9, 0)}.items():
        monkeypatch.setattr(device, name, lambda value=value: value)
    monkeypatch.setattr(device, "select", lambda kind: None)
    report = gpu_suite.run_suite(None)
    assert report["tests"]["counts"] == {"passed": 3}
    assert report["operators"]["rows"] == 4
    # 150 s of tests, twice 70 s of operators, 70 s for each training; the last ones do not start.
    assert limits == [180.0, 90.0, 90.0, 80.0, 80.0, 80.0, 30.0]
    assert [one["part"] for one in report["trainings"]] == [
        one.name for one in gpu_suite.TRAININGS[:4]
    ]
    left_out = {one["part"]: one["why"] for one in report["not_measured"]}
    assert left_out["operators --compiled"] == "exit code 1: no compiler"
    for one in gpu_suite.TRAININGS[4:]:
        assert left_out[one.name] == "no time left of 530 s for all parts"
    text = gpu_suite.markdown(report | {"trainings": []})
    assert "| rms_norm | forward | 192 |" in text
    assert "not measured: operators --compiled" in text


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
    assert "OutOfMemoryError: full" in gpu_suite._measure_training(one, None, 60.0)["why"]
    assert gpu_suite._measure_training(one, 5.0, 60.0)["why"] == "not done within 60 s"
    tests = gpu_suite._run_tests()
    assert tests["counts"] == {"failed": 1, "passed": 14}
    assert tests["failures"] == ["FAILED tests/gpu/a.py::b - c"]
    assert not tests["ok"]
    assert gpu_suite._run_tests()["why"].startswith("not done within")


TINY_DATA = (
    *("--tokens", "20000", "--documents", "50", "--index-documents", "300", "--samples", "1000"),
    *("--turn-samples", "20", "--seq-length", "64", "--rounds", "2", "--repeats", "1"),
    *("--megabytes", "0.05"),
)


@pytest.mark.slow
def test_the_data_benchmark_measures_ours_and_says_what_is_missing(tmp_path: Path) -> None:
    text = tmp_path / "text.jsonl"
    lines = [json.dumps({"text": f"line {n}: the quick brown fox, again " * 9}) for n in range(60)]
    text.write_text("\n".join(lines) + "\n")
    output = tmp_path / "out" / "data.json"
    done = script("data.py", *TINY_DATA, "--text", str(text), "--json", str(output))
    assert done.status == 0, done.err
    report = json.loads(output.read_text())
    sections = {section["name"]: section for section in report["sections"]}
    assert list(sections) == list(data.SECTIONS)
    assert report["peers"] is None
    for name, section in sections.items():
        assert f"== {name}: " in done.out
        assert all(row["cpu"] >= 0 and row["who"].strip() for row in section["rows"])
        assert "no --peer-python, so there is no peer here" in section["notes"]
        for target in section["targets"]:
            beside_a_peer = "megatron-core" in target["what"]
            assert (target["found"] is None) == beside_a_peer
            assert (target["reached"] is None) == beside_a_peer
    assert done.out.count("not measured") == 4  # preprocess, two blends, sample-index
    assert "wall s after imports" in done.out
    rows = {row["who"]: row for row in sections["samples"]["rows"]}
    assert {"ours off", "ours touched", "ours touched, mapped", "bare memmap"} <= rows.keys()
    assert len(rows["ours touched"]["turns"]) == 2
    assert any("every .bin has the same bytes" in n for n in sections["preprocess"]["notes"])


def test_the_data_benchmark_does_only_the_sections_asked_for_and_keeps_its_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [*TINY_DATA, "--folder", str(tmp_path / "kept"), "--only", "samples"]
    for made in (True, False):
        data.main(flags)
        output = capsys.readouterr().out
        assert ("made a corpus of 20,000 tokens" in output) == made
        assert output.count("== ") == 1
        assert "touched beside off, % more CPU s" in output


def test_the_peers_side_of_the_data_benchmark_imports_nothing_of_ours() -> None:
    peers = data_sections.PEERS
    code = f"""
import runpy, sys
sys.path.insert(0, {str(peers.parent)!r})
found = runpy.run_path({str(peers)!r})
assert not any(name.split(".")[0] in ("megatron", "torch", "tools") for name in sys.modules)
print(*sorted(found["JOBS"]))
"""
    done = subprocess.run(
        [sys.executable, "-I", "-c", code], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    ours = {"open_samples", "read_samples", "blending", "sample_index", "first_batch"}
    assert ours <= set(done.stdout.split())


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (("--repeats", "0"), "--repeats is too small"),
        (("--tokens", "1000"), "--tokens is too small"),
        (("--vocab-file", "vocab.json"), "a GPT-2 vocabulary is two files"),
    ],
)
def test_the_data_benchmark_refuses_flags_that_measure_nothing(
    flags: tuple[str, ...], problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        data.main(flags)


def test_a_job_that_fails_is_told_with_its_traceback() -> None:
    with data_worker.Worker(sys.executable, data_sections.OURS) as worker:
        with pytest.raises(data_worker.WorkerError, match=r"job read_samples failed(.|\n)*absent"):
            worker.ask("read_samples", name="absent", start=0, count=1)
        assert worker.ask("blending", weights=[1.0, 2.0], size=9, digest=True)["digest"]
    gone = data_worker.Worker(sys.executable, ROOT / "absent.py")
    with gone, pytest.raises(data_worker.WorkerError, match="process of the job blending ended"):
        gone.ask("blending")


def test_turns_alternate_and_ratios_are_those_of_neighbouring_turns() -> None:
    order = []

    def turn(who: str, seconds: list[float]) -> data_turns.Turn:
        def take() -> dict[str, Any]:
            order.append(who)
            return {"cpu": seconds.pop(0), "wall": 1.0, "peak_mb": 5.0}

        return take

    rows = data_turns.take_turns(
        {"a": turn("a", [1.0, 2.0, 9.0]), "b": turn("b", [2.0, 4.0, 9.0])},
        repeats=3,
        amount=10,
        unit="MB",
        fresh=True,
    )
    assert "".join(order) == "abbaab"
    assert rows[0].per_cpu_second == pytest.approx(5.0)
    assert data_turns.ratio(rows[1], rows[0]) == pytest.approx(2.0)
    assert data_turns.ratio(rows[1], None) is None
    targets = [
        data_turns.Target("fast", 2.0, at_least=2.0),
        data_turns.Target("cheap", 3.0, below=3.0),
        data_turns.Target("unknown", None, at_least=1.0),
    ]
    text = data_turns.table(data_turns.Section("name", "says", rows, targets, ["something"]))
    assert "target >= 2: fast: 2, reached" in text
    assert "target < 3: cheap: 3, NOT REACHED" in text
    assert "target >= 1: unknown: not measured" in text
    assert "note: something" in text
    with pytest.raises(NumericsError, match="ours and the peer's differ: the order"):
        data_turns.require_equal("the order", "x", "y")


def test_the_lengths_of_the_documents_add_up() -> None:
    for documents, tokens in ((1, 5), (50, 20_000), (7, 8)):
        sizes = data_sections.document_sizes(documents, tokens, np.random.default_rng(1))
        assert sizes.sum() == tokens
        assert sizes.min() >= 1


def test_paragraphs_of_plain_text_become_documents_of_some_length(tmp_path: Path) -> None:
    path = tmp_path / "book.txt"
    path.write_text("\n\n".join(f"paragraph {n} " + "word " * 200 for n in range(12)))
    found = list(data_preprocess._documents([path]))
    assert sum(text.count("paragraph") for text in found) == 12
    assert 1 < len(found) < 12
    assert all(text for text in found)


def test_the_pipeline_benchmark_reads_its_clock_against_theory() -> None:
    case = pipeline_bubble.Case("1f1b", 2, 8, 1)
    # Eight micro-batches of 3 units and one of waiting, of 10 ms each.
    stages = [pipeline_bubble.Measured(0.27, 0.24, peak) for peak in (2, 1)]
    line = pipeline_bubble.row(case, stages, unit_s=0.01)
    assert line == "| 1f1b | 2 | 8 | 1 | 11.1% | 11.1% | 1.000 | 2 1 | 2 1 |"


def forked_stages(case: pipeline_bubble.Case) -> Any:
    """Measure in a process that forks the stages: they need not import torch."""
    fork = mp.get_context("fork")
    with patch.object(mp, "get_context", lambda method: fork):
        return pipeline_bubble.measure(case, unit_s=0.001, steps=1)


@pytest.mark.parametrize("case", [("zero-bubble", 2, 3, 1), ("interleaved", 2, 3, 2)])
def test_the_pipeline_benchmark_runs_its_stages(
    case: tuple[str, int, int, int], tmp_path: Path
) -> None:
    wanted = pipeline_bubble.Case(*case)
    stages = Call(tmp_path, "measure", forked_stages, wanted).value(within_s=60)
    assert [one.peak for one in stages] == ([2, 1] if wanted.chunks == 1 else [6, 4])
    # Sleeps never end early: 3 units of work for each micro-batch.
    assert all(one.step_s >= one.work_s >= 0.009 for one in stages)
