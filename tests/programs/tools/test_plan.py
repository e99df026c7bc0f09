"""`tools/plan.py` from flags to tables and JSON, and what it refuses."""

import json
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
