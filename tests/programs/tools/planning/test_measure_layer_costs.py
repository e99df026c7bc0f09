"""measure_layer_costs.py: one cost for each layer, which the run's own flag takes; refusals."""

import sys
from pathlib import Path

import pytest

from megatron.arguments import parse_args
from megatron.errors import ConfigError
from megatron.model.specs import LayerSpec
from tests.support.launch import ROOT, run_program
from tools.planning.measure_layer_costs import LayerTime, main, report

FLAGS = (
    "--num-layers 5 --hidden-size 16 --num-attention-heads 2 --seq-length 8 "
    "--max-position-embeddings 8 --micro-batch-size 1 --tokenizer-type NullTokenizer "
    "--vocab-size 40 --train-iters 1 --lr 0.1 --data-path not-there --device cpu"
)
NAMES = ["embedding", *(f"layers.{i}" for i in range(5)), "final_norm", "embedding.word"]


def layers_of_five_blocks() -> list[LayerSpec]:
    def never() -> None:
        raise AssertionError

    return [LayerSpec(name, never, block=name.startswith("layers.")) for name in NAMES]  # type: ignore[arg-type]


EXPERTS = (
    "--num-experts 3 --moe-router-topk 2 --disable-bias-linear --openai-gelu --moe-z-loss-coeff 0.1"
)


@pytest.mark.parametrize(
    ("more", "kinds"), [("", "00000"), (f"{EXPERTS} --moe-layer-freq 2", "10101")]
)
def test_what_it_prints_is_taken_by_the_flag_of_a_run(
    tmp_path: Path, more: str, kinds: str
) -> None:
    flags = f"{FLAGS} {more} --repeats 2".split()
    words = [sys.executable, "-m", "tools.planning.measure_layer_costs", *flags]
    ended = run_program(words, cwd=ROOT)
    assert ended.status == 0, ended.text
    lines = ended.out.splitlines()
    assert [line.split()[0] for line in lines[1 : 1 + len(NAMES)]] == NAMES
    (flag,) = (line for line in lines if line.startswith("--pipeline-layer-costs "))
    config = parse_args([*FLAGS.split(), *flag.split()])
    costs = config.parallel.pipeline_layer_costs
    assert costs is not None
    assert len(costs) == len(NAMES)
    assert all(cost > 0 for cost in costs)
    # Layers that are alike differ by noise alone, others do not.
    assert set(zip(kinds, costs[1:6])) == set(dict(zip(kinds, costs[1:6])).items())
    assert len(set(costs[1:6])) == len(set(kinds))
    assert "stages" not in ended.out  # no pipeline was asked for


def test_it_says_what_the_costs_change() -> None:
    config = parse_args([*FLAGS.split(), "--pipeline-model-parallel-size", "2"])
    times = [LayerTime(name, 1.0, 1.0) for name in NAMES]
    times[0], times[-1] = LayerTime("embedding", 0.0, 0.0), LayerTime("embedding.word", 4.0, 4.0)
    text = report(config, layers_of_five_blocks(), times)
    assert "--pipeline-layer-costs 0 2 2 2 2 2 2 8" in text
    # By layers the stages cost 6 and 14, by costs 8 and 12: one block stands beside the head.
    assert "by number of layers: 1.400, with 4 4 layers of the list" in text
    assert "by these costs: 1.200, with 5 3 layers of the list" in text


def test_layers_are_timed_at_least_once() -> None:
    with pytest.raises(ConfigError, match="layers cannot be timed without running them"):
        main([*FLAGS.split(), "--repeats", "0"])
