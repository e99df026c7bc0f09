"""The benchmark of operators compares results before times, and measures only kernels."""

import json
from pathlib import Path

import pytest

from benchmarks import ops
from benchmarks.ops import CASES, main
from megatron.errors import ConfigError
from megatron.ops import library

TINY = ("--rows", "4", "--widths", "192", "--rounds", "2")


def test_every_operator_is_measured_in_both_passes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(library, "INSTRUCTION_SET", library.INSTRUCTION_SET or "plain")
    main([*TINY, "--json", str(tmp_path / "out" / "ops.json")])
    report = json.loads((tmp_path / "out" / "ops.json").read_text())
    rows = {(row["operator"], row["pass"], row["dtype"]) for row in report["results"]}
    names = [case.name for case in CASES]
    passes = {(n, p, d) for n in names for p in ("forward", "backward") for d in ops.DTYPES}
    assert rows == passes | {("adamw", "update", dtype) for dtype in ops.DTYPES}
    assert all(row[f"{who}_us"] > 0 for row in report["results"] for who in ("ours", "eager"))
    assert len(capsys.readouterr().out.splitlines()) == 2 + len(report["results"])


@pytest.mark.wide  # compiles
def test_pytorch_is_measured_compiled_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "INSTRUCTION_SET", library.INSTRUCTION_SET or "plain")
    monkeypatch.setattr(ops, "CASES", (CASES[0], CASES[-2]))  # one keeps its angles
    main([*TINY, "--dtypes", "fp32", "--compiled", "--json", str(tmp_path / "ops.json")])
    *compiled, update = json.loads((tmp_path / "ops.json").read_text())["results"]
    assert len(compiled) == 4
    assert all(row["compiled_us"] > 0 for row in compiled)
    assert "compiled_us" not in update


def test_bytes_are_those_of_the_tensors_that_move() -> None:
    plain, fused, gated, rotated = CASES[0], CASES[1], CASES[-4], CASES[-3]
    assert plain.moved(10, 2) == (2 * 20, 3 * 20)  # x, out; grad, x, grad_x
    assert rotated.moved(10, 2) == (2 * 20, 2 * 20)  # x, out; grad, grad_x
    assert CASES[-2].moved(10, 2) == rotated.moved(10, 2)
    assert CASES[-1].moved(10, 2) == (3 * 20, 2 * 20)  # x, residual, out; grad, grad_x
    assert gated.moved(10, 2) == (20 + 10, 10 + 20 + 20)  # gates and values; half of them out
    assert fused.moved(10, 2) == (4 * 20, 4 * 20)  # x, residual, sum, out; both grads, sum, grad_x


def test_times_of_wrong_results_are_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "INSTRUCTION_SET", "plain")
    wrong = ops.Case("wrong", lambda x, w: (x * w * 1.001,), lambda x, w: (x * w,), 1, 1)
    monkeypatch.setattr(ops, "CASES", (wrong,))
    with pytest.raises(AssertionError, match="not close"):
        main([*TINY, "--dtypes", "fp32"])


def test_without_kernels_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "INSTRUCTION_SET", None)
    with pytest.raises(ConfigError, match="there are no kernels to measure"):
        main(TINY)
