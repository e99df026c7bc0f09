"""gpt-neox's files become runs: several of them, with all that is wrong with them."""

import json
from pathlib import Path
from typing import Any

import pytest

from megatron.arguments import parse_args
from megatron.config.neox.mapping import read_neox
from megatron.config.run import RunConfig
from megatron.errors import PreflightError
from tests.support.output import without_times
from tests.unit.config.neox.configs import PYTHIA, SIZES, a_config, a_pythia
from tests.unit.config.neox.runs import problem_of, run_of


def _written(folder: Path, name: str, config: Any) -> str:
    path = folder / name
    path.write_text(json.dumps(config))
    return str(path)


def _shape(run: RunConfig) -> tuple[int, int, int]:
    return run.model.num_layers, run.model.hidden_size, run.model.num_attention_heads


@pytest.mark.parametrize("size", SIZES)
def test_sizes_that_gpt_neox_ships_are_read(size: str) -> None:
    run = run_of(a_config(*SIZES[size]), world_size=2)
    assert _shape(run) == SIZES[size]
    assert run.model.ffn_width == 4 * run.model.hidden_size
    assert (run.training.micro_batch_size, run.training.global_batch_size) == (4, 8)


@pytest.mark.parametrize("size", PYTHIA)
def test_each_pythia_is_read(size: str) -> None:
    run = run_of(a_pythia(size, model_parallel_size=2), world_size=32)
    assert _shape(run) == PYTHIA[size]
    assert run.model.use_parallel_residual
    assert not run.model.tied
    assert (run.model.rotary_percent, run.precision.initial_loss_scale) == (0.25, 4096)
    assert run.training.global_batch_size == 64
    assert run.training.distribute_saved_activations
    assert run.parallel.data_parallel_sharding_strategy == "optim"


def test_the_command_line_wins_over_config_files_over_gpt_neoxs(tmp_path: Path) -> None:
    neox = _written(tmp_path, "neox.yml", a_config(seed=1, eval_iters=1, log_interval=1))
    ours = _written(tmp_path, "ours.yaml", {"seed": 2, "eval_iters": 2})
    words = ["--seed", "3", "--config", ours, "--neox-config", neox]
    run = parse_args(words, world_size=1)
    assert (run.training.seed, run.training.eval_iters, run.logging.log_interval) == (3, 2, 1)


def test_several_files_are_one_config_whose_names_may_lack_yml(tmp_path: Path) -> None:
    whole = {key.replace("_", "-"): value for key, value in a_config(seed=5).items()}
    halves = dict(list(whole.items())[:9]), dict(list(whole.items())[9:])
    for name, half in zip(("one.yml", "two.json"), halves, strict=True):
        _written(tmp_path, name, half)
    paths = [str(tmp_path / "one"), str(tmp_path / "two.json")]
    assert parse_args(["--neox-config", *paths], world_size=1) == run_of(a_config(seed=5))


def test_a_key_in_two_files_is_refused_in_whatever_spelling(tmp_path: Path) -> None:
    one = _written(tmp_path, "one.yml", a_config())
    two = _written(tmp_path, "two.yml", {"train-iters": 5})
    neox = read_neox([one, two], world_size=1)
    (problem,) = neox.problems
    assert problem.problem == "a key stands in gpt-neox's config files twice"
    assert "two.yml, line 1" in str(problem.found)
    assert not neox.values


def test_files_that_cannot_be_read_are_all_named(tmp_path: Path) -> None:
    (tmp_path / "bad.yml").write_text("a: 1\n\tb: 2")
    neox = read_neox([str(tmp_path / "bad.yml"), str(tmp_path / "none")], world_size=1)
    assert ["bad.yml" in str(p.found) for p in neox.problems] == [True, False]
    assert "--neox-config" in str(neox.problems[1].found)
    with pytest.raises(PreflightError, match="no config file was named"):
        parse_args(["--neox-config"])


def test_neoxs_defaults_hold_where_ours_differ() -> None:
    run = run_of(a_config())
    assert (run.model.hidden_dropout, run.model.attention_dropout) == (0, 0)
    assert (run.optimizer.weight_decay, run.schedule.lr_warmup_fraction) == (0.1, 0.01)
    assert run.model.onnx_safe


def test_what_has_no_effect_is_said_with_its_reason(capsys: pytest.CaptureFixture[str]) -> None:
    run_of(a_config(gas=1, launcher="slurm", log_dir=None))
    said = without_times(capsys.readouterr().out).splitlines()
    assert said[0] == (
        "gas: accepted, has no effect here because neox overwrites it by "
        "gradient_accumulation_steps"
    )
    assert len(said) == 2


@pytest.mark.parametrize(
    ("keys", "problem", "fix"),
    [
        ({"hiden_size": 3}, "gpt-neox has no such key", "did you mean hidden_size?"),
        ({"moe_num_experts": 8}, "neox's mixture of experts", "--num-experts"),
        ({"use_mup": True}, "muP", "leave it out"),
        ({"train_impl": "dpo"}, "post-training", "--sft"),
        ({"num_unique_layers": 1}, "layers that share weights", "leave it out"),
        ({"scheduler": {"type": "WarmupLR"}}, "schedules of DeepSpeed", "use lr_decay_style"),
        ({"data_impl": "lazy"}, "kind of corpus files", "use mmap"),
        ({"global_num_gpus": 8}, "another number of ranks than the 1", "start 8 ranks"),
        ({"train_batch_size": 8}, "sizes of the batches contradict", "train_batch_size 4"),
        ({"model_parallel_size": 2}, "no whole number of replicas", "a multiple of 2"),
        ({"seed": "7"}, "wrong kind", "a whole number"),
        ({"hidden_size": 9}, "does not divide into attention heads", "--hidden-size 8"),
    ],
)
def test_what_cannot_be_taken_is_refused_by_name(
    keys: dict[str, Any], problem: str, fix: str
) -> None:
    error = problem_of(a_config(**keys))
    assert problem in error.problem
    assert fix in error.fix


@pytest.mark.parametrize(
    "keys",
    [
        {"moe_num_experts": 1, "use_mup": False, "train_impl": "normal", "data_impl": "mmap"},
        {"param_sharing_style": "grouped", "scheduler": None, "s3_chunk_size": 104857600},
        {"sparsity_config": {}, "pack_impl": "Packed", "global_num_gpus": 1},
    ],
)
def test_values_of_other_features_that_turn_them_off_are_accepted(keys: dict[str, Any]) -> None:
    assert run_of(a_config(**keys)) == run_of(a_config())


def test_batches_are_of_the_ranks_of_the_launcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = _written(tmp_path, "neox.yml", a_config(model_parallel_size=2))
    launched = {"RANK": "0", "WORLD_SIZE": "6", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "6"}
    for name, value in (launched | {"MASTER_ADDR": "localhost", "MASTER_PORT": "1"}).items():
        monkeypatch.setenv(name, value)
    assert parse_args(["--neox-config", path]).training.global_batch_size == 12


def test_problems_of_flags_name_the_key_they_come_from() -> None:
    error = problem_of(a_config(no_weight_tying=True, hidden_dropout=2))
    assert "--hidden-dropout 2.0 (--hidden-dropout from hidden_dropout: " in str(error.found)
    error = problem_of(a_config(optimizer={"params": {"lr": -1}}, min_lr=0))
    assert "--lr from optimizer: " in str(error.found)


def test_no_key_that_is_null_changes_a_run() -> None:
    nulls = {"seed": None, "norm": None, "fp16": None, "optimizer": None, "min_lr": 0}
    assert run_of(a_config(**nulls)) == run_of(a_config(optimizer={"params": {}}, min_lr=0))
