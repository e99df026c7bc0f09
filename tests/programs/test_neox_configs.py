"""gpt-neox's configs through the real programs: planned in full size, trained shrunken."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.launch import byte_corpus, pretrain_words, run_program
from tests.unit.config.neox.configs import PYTHIA, SIZES, a_config, a_pythia
from tools.plan import plan_of

_NO_FILES = {"vocab_file": None, "merge_file": None}
_PADDED = 50048  # 50000 tokens and an end of document, to a multiple of 128
_WORDS = ("--tokenizer-type", "NullTokenizer", "--vocab-size", "50000")


def _parameters(layers: int, hidden: int, vocabulary: int) -> int:
    """Return those of a GPT with rotary positions, biases and an output projection of its own."""
    of_layer = 12 * hidden**2 + 13 * hidden
    return layers * of_layer + 2 * vocabulary * hidden + 2 * hidden


@pytest.mark.parametrize(
    ("size", "config", "bytes_of_each"),
    [
        (SIZES["125M"], a_config(*SIZES["125M"], **_NO_FILES), 4),
        (SIZES["1-3B"], a_config(*SIZES["1-3B"], precision="bfloat16", **_NO_FILES), 2),
        (PYTHIA["160M"], a_pythia("160M", zero_optimization={"stage": 0}, **_NO_FILES), 2),
    ],
)
def test_configs_are_planned_in_full_size(
    tmp_path: Path, size: tuple[int, int, int], config: dict[str, Any], bytes_of_each: int
) -> None:
    path = tmp_path / "neox.yml"
    path.write_text(json.dumps(config))
    plan = plan_of(["--world-size", "8", "--ranks", "0", "--neox-config", str(path), *_WORDS])
    layers, hidden, _ = size
    expected = bytes_of_each * _parameters(layers, hidden, _PADDED)
    assert plan.ranks[0].bytes.weights == expected
    assert plan.world.config.training.global_batch_size == 4 * 8


def test_a_shrunken_pythia_learns(tmp_path: Path) -> None:
    """Two files, as gpt-neox's launcher takes them: a model, and a place with its data."""
    model = a_pythia("14M", num_layers=2, hidden_size=32, num_attention_heads=4)
    model |= {"seq_length": 32, "max_position_embeddings": 32, "train_iters": 12}
    model |= {
        "lr_decay_iters": 12,
        "attention_config": [[["flash"], 2]],
        "log_interval": 1,
        "num_workers": 0,
    }
    model |= {"gradient_accumulation_steps": 2, "eval_iters": 1}
    model |= {"optimizer": {"params": {"lr": 0.02}}, "min_lr": 0.002, "warmup": 0.1}
    del model["vocab_file"], model["merge_file"], model["data_path"], model["fp16"]
    local = {
        "data-path": byte_corpus(tmp_path),
        "save": str(tmp_path / "save"),
        "distributed-backend": "gloo",
    }
    lines = [json.dumps({key: value})[1:-1] for key, value in model.items()]
    (tmp_path / "model.yml").write_text("{\n  # a comment\n  " + ",\n  ".join(lines) + ",\n}\n")
    (tmp_path / "local.yml").write_text("".join(f"{k}: {v}\n" for k, v in local.items()))
    files = ["--neox-config", str(tmp_path / "model"), str(tmp_path / "local")]
    flags = [*files, "--tokenizer-type", "ByteTokenizer", "--split", "80,10,10"]
    ended = run_program(pretrain_words(*flags), cwd=tmp_path)
    assert ended.status == 0, ended.text
    losses = [float(loss) for loss in re.findall(r"lm loss: ([\d.E+-]+)", ended.out)]
    assert len(losses) == 12
    assert losses[-1] < losses[0] - 1
    assert re.findall(r"global batch size: +(\d+)", ended.out)[0] == "8"
    saved = {path.name for path in (tmp_path / "save").glob("iter_*")}
    assert saved == {f"iter_{iteration:07}" for iteration in (1, 2, 4, 12)}
    stored = json.loads((tmp_path / "save" / "iter_0000012" / "manifest.json").read_text())
    assert stored["config"]["model"]["use_parallel_residual"] is True
    assert stored["config"]["model"]["output_layer_init_method_std"] == 2 / 2 / 32**0.5
