"""`tools/plan.py` from flags to tables and JSON, and what it refuses."""

import json
import re
from pathlib import Path

import pytest

from megatron.errors import ConfigError, PreflightError
from tools.plan import main

FLAGS = (
    *("--num-layers", "4", "--hidden-size", "16", "--num-attention-heads", "4"),
    *("--seq-length", "16", "--max-position-embeddings", "16", "--bf16", "--train-iters", "1"),
    *("--micro-batch-size", "1", "--global-batch-size", "16", "--lr", "0.1"),
    *("--tokenizer-type", "NullTokenizer", "--vocab-size", "50", "--data-path", "nowhere"),
    *("--make-vocab-size-divisible-by", "4", "--tensor-model-parallel-size", "2"),
    *("--pipeline-model-parallel-size", "2", "--use-distributed-optimizer"),
)
HARDWARE = {
    "peak_flops": {"bf16": 1e12},
    "efficiency": 0.5,
    "memory_bandwidth": 1e11,
    "ranks_per_node": 8,
    "node": {"bandwidth": 1e10, "latency": 1e-6},
    "network": {"bandwidth": 1e9, "latency": 1e-5},
}


def test_a_plan_as_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hardware = tmp_path / "hardware.json"
    hardware.write_text(json.dumps(HARDWARE))
    main(["--world-size", "16", "--hardware", str(hardware), *FLAGS])
    text = capsys.readouterr().out
    assert "16 ranks: tp 2 x pp 2 x dp 4 x cp 1, ep 1" in text
    assert "counted FLOPs of all ranks: 100.0000% of those by formula" in text
    assert "sent in a step by rank 0" in text
    assert "sent in a step by rank 8" in text
    assert "bubble: 20.00% of the passes" in text
    assert "tokens/s on each rank, MFU" in text
    for part in ("computation", "communication over tp", "idle between stages", "update"):
        assert f"  {part}" in text


def test_a_plan_as_json_of_chosen_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--world-size", "16", "--ranks", "3", "--json", *FLAGS])
    plan = json.loads(capsys.readouterr().out)
    assert plan["layout"] == {"tp": 2, "pp": 2, "dp": 4, "cp": 1, "ep": 1, "etp": 2}
    assert plan["microbatches"] == 4
    (rank,) = plan["ranks"]
    assert rank["coordinate"] == {"pp": 0, "dp": 1, "cp": 0, "tp": 1}
    assert rank["bytes"]["peak"] > sum(
        rank["bytes"][name] for name in ("weights", "gradients", "optimizer")
    )
    gathers = [one for one in rank["calls"] if one["axis"] == "dp_cp"]
    assert {tuple(one["ranks"]) for one in gathers} == {(1, 3, 5, 7)}
    assert "seconds" not in plan


def test_a_plan_of_a_bert(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = tmp_path / "vocab.txt"
    words.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b"]) + "\n")
    at = FLAGS.index("--tokenizer-type")
    flags = (*FLAGS[:at], *FLAGS[at + 4 :])
    main(["--world-size", "8", "--task", "bert", "--vocab-file", str(words), "--json", *flags])
    plan = json.loads(capsys.readouterr().out)
    assert [rank["rank"] for rank in plan["ranks"]] == [0, 4]


@pytest.mark.parametrize(
    "more",
    [
        ["--position-embedding-type", "relative"],
        ["--noise-density", "0.15", "--vocab-extra-ids", "16"],
    ],
)
def test_a_plan_of_a_t5_counts_the_flops_of_both_stacks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str]
) -> None:
    words = tmp_path / "vocab.txt"
    words.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b"]) + "\n")
    at = FLAGS.index("--tokenizer-type")
    flags = (*FLAGS[:at], *FLAGS[at + 4 :], *more)
    depth = ("--decoder-num-layers", "3", "--decoder-seq-length", "8")
    given = ("--world-size", "8", "--task", "t5", "--vocab-file", str(words))
    main([*given, *depth, *flags])
    text = capsys.readouterr().out
    assert "sent in a step by rank 4" in text
    found = re.search(r"counted FLOPs of all ranks: ([\d.]+)% of those by formula", text)
    assert found is not None
    assert float(found[1]) == pytest.approx(100.0, abs=0.1)  # by formula rounded to a token


@pytest.mark.parametrize(
    ("task", "more"),
    [
        ("prefix-lm", ()),
        ("t0", ()),
        ("ict", ("--titles-data-path", "nowhere")),
        ("vit", ("--num-classes", "3", "--img-dim", "16", "--patch-dim", "2")),
    ],
)
def test_a_plan_of_each_other_program_counts_the_flops_of_its_formula(
    capsys: pytest.CaptureFixture[str], task: str, more: tuple[str, ...]
) -> None:
    main(["--world-size", "8", "--task", task, "--json", *FLAGS, *more])
    plan = json.loads(capsys.readouterr().out)
    assert [rank["rank"] for rank in plan["ranks"]] == [0, 4]
    # Heads that look at one vector of a row are not in the formulas, and all tp ranks compute the
    # patches of an image.
    counted = 2 * 2 * sum(sum(rank["flops"].values()) for rank in plan["ranks"])
    assert counted == pytest.approx(plan["flops_by_formula"], rel=1e-2)


@pytest.mark.parametrize(
    ("flags", "error", "words"),
    [
        (["--world-size", "6"], PreflightError, ["6 ranks", "start a multiple of 4 ranks"]),
        (["--world-size", "0"], ConfigError, ["--world-size 0", "use 1 or more"]),
        (["--world-size", "16", "--ranks", "16"], ConfigError, ["rank 16 of 16", "0 to 15"]),
        (
            ["--world-size", "16", "--num-attention-heads", "5"],
            PreflightError,
            ["--num-attention-heads 5"],
        ),
        (["--world-size", "16", "--hardware", "none.json"], ConfigError, ["none.json"]),
        (["--world-size", "16", "--optimizer", "sgd"], ConfigError, ["--optimizer sgd"]),
    ],
)
def test_what_cannot_be_planned_is_refused(
    flags: list[str], error: type[Exception], words: list[str]
) -> None:
    with pytest.raises(error) as raised:
        main([*FLAGS, *flags])
    assert all(word in str(raised.value) for word in words)


SEARCHED = (
    *(FLAGS[: FLAGS.index("--micro-batch-size")] + FLAGS[FLAGS.index("--global-batch-size") :]),
    *("--world-size", "8", "--search", "--search-rehearsals", "3"),
)


def _hardware(folder: Path) -> str:
    path = folder / "hardware.json"
    path.write_text(json.dumps(HARDWARE))
    return str(path)


def test_a_search_proposes_layouts_as_flags_of_a_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    beside = ("--hardware", _hardware(tmp_path))
    main([*SEARCHED, *beside, "--memory-gib", "1", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert len(found["layouts"]) == 3
    assert found["not_tried"] > 0
    assert found["over_memory_by_lower_bound"] == found["rehearsed_over_memory"] == 0
    best = found["layouts"][0]
    assert "--tensor-model-parallel-size" not in best["flags"]  # it was given
    rest = SEARCHED[: SEARCHED.index("--search")]
    main([*rest, *beside, "--json", *best["flags"]])
    plan = json.loads(capsys.readouterr().out)
    assert best["seconds"] == plan["seconds"]
    assert best["peak_bytes"] == max(rank["bytes"]["peak"] for rank in plan["ranks"])
    assert best["tokens_per_second_per_rank"] == plan["tokens_per_second_per_rank"]
    assert best["bubble_share"] == plan["bubble_share"]


def test_a_search_as_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main([*SEARCHED, "--hardware", _hardware(tmp_path), "--memory-gib", "1"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[-1] == "layout"
    assert "--micro-batch-size" in lines[1]
    assert "rehearsed: 3 layouts that fit, 0 that do not" in lines
    assert lines[-1].startswith("not tried: ")
    assert lines[-1].endswith("--search-rehearsals tries more")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ([], ["--memory-gib not given", "--memory-gib 80"]),
        (["--memory-gib", "0"], ["--memory-gib 0.0"]),
        (["--memory-gib", "nan"], ["--memory-gib nan"]),
        (["--memory-gib", "1", "--search-rehearsals", "0"], ["--search-rehearsals 0"]),
        (["--memory-gib", "1", "--ranks", "0"], ["--ranks", "--search alone"]),
        (["--memory-gib", "1", "--world-size", "0"], ["--world-size 0"]),
        (["--memory-gib", "1e-9"], ["no layout fits", "bytes too much", "use more ranks"]),
        (
            ["--memory-gib", "1", "--tensor-model-parallel-size", "3"],
            ["no layout of these ranks", "--tensor-model-parallel-size"],
        ),
    ],
)
def test_a_search_that_cannot_be_done_is_refused(
    tmp_path: Path, flags: list[str], words: list[str]
) -> None:
    with pytest.raises(ConfigError) as raised:
        main([*SEARCHED, "--hardware", _hardware(tmp_path), *flags])
    assert all(word in str(raised.value) for word in words)


def test_a_search_needs_machines_and_a_batch(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="lacks") as raised:
        main([*SEARCHED, "--memory-gib", "1"])
    assert "--hardware not given" in str(raised.value)
    at = SEARCHED.index("--global-batch-size")
    without = [*SEARCHED[:at], *SEARCHED[at + 2 :]]
    with pytest.raises(ConfigError) as raised:
        main([*without, "--memory-gib", "1", "--hardware", _hardware(tmp_path)])
    assert "--global-batch-size not given" in str(raised.value)
