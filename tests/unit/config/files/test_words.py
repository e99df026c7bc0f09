"""Config files are merged by what their keys mean, and answered as flags are."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.arguments import parse_args, parse_given
from megatron.config.model import GluActivation, PositionEmbedding
from megatron.config.run import GROUPS
from tests.support.output import without_times
from tests.unit.config.groups import COMMAND, a_run, problems_of

_FILE = """\
model:
  num_layers: 2
  hidden-size: 8
  num_attention_heads: 2
data: {seq_length: 16, data_path: corpus}
tokenizer_type: NullTokenizer
vocab_size: 100
training: {micro_batch_size: 2, train_iters: 10}
schedule:
  lr: 1e-3
"""


class _Folder:
    """Writes files that a command line names."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, text: str, name: str = "run.yaml") -> str:
        path = self.folder / name
        path.write_text(text, encoding="utf-8")
        return str(path)


@pytest.fixture
def write(tmp_path: Path) -> _Folder:
    return _Folder(tmp_path)


def test_a_file_becomes_a_run(write: _Folder) -> None:
    assert parse_args(["--config", write(_FILE)]) == a_run()


@given(st.permutations(range(3)))
def test_flags_win_over_later_files_over_earlier_ones_whatever_stands_first(
    tmp_path_factory: pytest.TempPathFactory, order: list[int]
) -> None:
    write = _Folder(tmp_path_factory.getbasetemp())
    first = write("seed: 1\neval_iters: 1\nlog_interval: 1\n", "first.yaml")
    second = write('{"seed": 2, "training": {"eval-iters": 2}}', "second.json")
    parts = [["--config", first, second], ["--seed", "3"], COMMAND]
    run = parse_args([word for at in order for word in parts[at]])
    assert (run.training.seed, run.training.eval_iters, run.logging.log_interval) == (3, 2, 1)


def test_every_use_of_the_flag_counts(write: _Folder) -> None:
    one, two = write("seed: 1\neval_iters: 1", "1.yaml"), write("seed = 2", "2.toml")
    run = parse_args(["--config", one, *COMMAND, f"--config={two}"])
    assert (run.training.seed, run.training.eval_iters) == (2, 1)


def test_a_flag_turns_off_what_a_file_turns_on(write: _Folder) -> None:
    path = write("swiglu: true\nadd_bias_linear: false\n")
    run = parse_args([*COMMAND, "--config", path, "--no-swiglu", "--add-bias-linear"])
    assert not run.model.swiglu
    assert run.model.add_bias_linear


@pytest.mark.parametrize(
    ("text", "linear"),
    [
        ("add_bias_linear: false", False),
        ("no_add_bias_linear: true", False),
        ("disable_bias_linear: true", False),
        ("disable_bias_linear: false", True),
        ("{}", True),
    ],
)
def test_a_switch_may_be_spelled_either_way(write: _Folder, text: str, linear: bool) -> None:
    path = write(f"{text}\n")
    assert parse_args([*COMMAND, "--openai-gelu", "--config", path]).model.add_bias_linear is linear


def test_other_spellings_of_one_flag_are_merged_as_one(write: _Folder) -> None:
    one, two = write("rope_theta: 5", "1.yaml"), write("rotary_base: 7.5", "2.yaml")
    base = [*COMMAND, "--position-embedding-type", "rope", "--config"]
    assert parse_args([*base, one, two]).model.rotary_base == 7.5
    assert parse_args([*base, two, one]).model.rotary_base == 5
    no, yes = write("no_swiglu: true", "1.yaml"), write("swiglu: true", "2.yaml")
    assert parse_args([*COMMAND, "--config", no, yes]).model.swiglu
    assert not parse_args([*COMMAND, "--config", yes, no]).model.swiglu


def test_null_and_an_empty_list_unset_what_a_file_before_sets(write: _Folder) -> None:
    one = write("{ffn_hidden_size: 5, seed: 7, load_only: [a], load: x, finetune: true}", "1.yaml")
    two = write("{ffn_hidden_size: null, seed: ~, load_only: []}", "2.yaml")
    run = parse_args([*COMMAND, "--config", one, two])
    assert (run.model.ffn_hidden_size, run.training.seed) == (None, 1234)
    assert run.checkpoint.load_only == ()
    one, two = write("encoder_seq_length: 5", "1.yaml"), write("seq_length: null", "2.yaml")
    assert parse_given(["--config", one, two]) == {}


def test_lists_are_the_values_of_one_flag(write: _Folder) -> None:
    path = write("data_path: [0.3, one, 1, two]\nprofile_ranks: [0, 1]\n")
    run = parse_args(["--config", path, *COMMAND[:8], *COMMAND[10:]])
    assert run.data.data_path == ("0.3", "one", "1", "two")
    assert run.logging.profile_ranks == (0, 1)


def test_a_preset_named_later_wins_over_shapes_of_files_before(write: _Folder) -> None:
    sizes = write("num_layers: 3\nhidden_size: 24\n", "sizes.yaml")
    preset = write("model_preset: gpt3-125m\nnum_layers: 4\n", "preset.yaml")
    rest = COMMAND[6:]
    both = parse_args([*rest, "--config", sizes, preset]).model
    assert (both.num_layers, both.hidden_size) == (4, 768)
    swapped = parse_args([*rest, "--config", preset, sizes, "--num-attention-heads", "3"]).model
    assert (swapped.num_layers, swapped.hidden_size) == (3, 24)
    typed = parse_args([*rest, "--config", preset, "--model-preset=gpt3-350m"]).model
    assert (typed.num_layers, typed.hidden_size) == (24, 1024)


def test_keys_of_other_megatrons_are_answered_as_their_flags(
    write: _Folder, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(
        "use_rotary_position_embeddings: true\nno_masked_softmax_fusion: true\n"
        "group_query_attention: true\nnum_query_groups: 2\ncheckpoint_activations: false\n"
    )
    run = parse_args([*COMMAND, "--config", path])
    assert run.model.position_embedding_type is PositionEmbedding.ROPE
    assert run.training.recompute_granularity is None
    assert "--no-masked-softmax-fusion: accepted, has no effect" in capsys.readouterr().out
    (error,) = problems_of("--config", write("use_bnb_optimizer: true"))
    assert "whose state has 8 bits" in error.problem


def test_a_key_of_ours_needs_no_switch_of_megatron_lm(write: _Folder) -> None:
    run = parse_args([*COMMAND, "--config", write("num_query_groups: 1")])
    assert run.model.query_groups == 1


def test_programs_that_read_no_whole_run_take_files_too(write: _Folder) -> None:
    path = write("glu_activation: geglu\nseed: 3\n")
    assert parse_given(["--config", path, "--seed", "4"]) == {
        "glu_activation": GluActivation.GEGLU,
        "seed": 4,
    }


def test_a_programs_own_flags_stand_in_a_file_too(write: _Folder) -> None:
    def provider(parser: Any) -> Any:
        parser.add_argument("--my_rate", type=float)
        parser.add_argument("--loud", action="store_true")
        parser.add_argument("--quiet", action="store_true")
        return parser

    path = write("extra: {my_rate: 0.5, loud: true, quiet: false}")
    run = parse_args([*COMMAND, "--config", path], extra_args_provider=provider)
    assert run.extra == {"loud": True, "my_rate": 0.5, "quiet": False}


@pytest.mark.parametrize(
    ("text", "problem", "found", "fix"),
    [
        ("num_layrs: 2", "is no flag", "num_layrs (", "did you mean num_layers?"),
        ("xyzzy: 2", "is no flag", "xyzzy (", "see --help"),
        ("modle: {seed: 1}", "no such group", "modle (", "did you mean model?"),
        ("seed: {a: 1}", "no such group", "seed (", "give seed a value"),
        ("model: {seed: {a: 1}}", "wrong kind", "seed: {'a': 1}", "a whole number"),
        ("save: {a: 1}", "no such group", "save (", "give save a value"),
        ("config: a.yaml", "does not name others", "config (", "--config base.yaml mine.yaml"),
        ("seq_length: 1\nencoder_seq_length: 2", "twice", "line 2)", "keep one"),
        ("train-iters: 1\ntrain_iters: 2", "twice", "line 1)", "keep one"),
        ("seed: '7'", "wrong kind", "seed: '7'", "a whole number, without quotes"),
        ("lr: 1_0", "wrong kind", "lr: '1_0'", "a number, without quotes"),
        ("lr: true", "wrong kind", "lr: True", "a number, without quotes"),
        ("save: 7", "wrong kind", "save: 7", "a text, in quotes"),
        ("save: true", "wrong kind", "save: True", "a text, in quotes"),
        ("save: --load", "wrong kind", "save: '--load'", "does not begin with a dash"),
        ("seed: [1, 2]", "wrong kind", "seed: [1, 2]", "one value, not a list"),
        ("data_path: [[a]]", "wrong kind", "data_path: [['a']]", "a text"),
        ("no_save_optim: 1", "wrong kind", "no_save_optim: 1", "true or false"),
        # What flags themselves answer says the place too.
        ("swiglu: yes", "wrong kind", "--swiglu yes (--swiglu from ", "give true or false"),
        ("seed: 1.5", "wrong kind", "--seed 1.5 (--seed from ", "give a whole number"),
        ("normalization: x", "wrong kind", "run.yaml, line 1)", "one of LayerNorm"),
        ("\nseed: -1", "negative", "--seed -1 (--seed from ", "use 0 or more"),
        ("batch_size: 1", "removed", "--batch-size (--batch-size from", "--micro-batch-size"),
    ],
)
def test_what_is_wrong_with_a_key_is_said_with_its_place(
    write: _Folder, text: str, problem: str, found: str, fix: str
) -> None:
    (error,) = problems_of("--config", write(text))
    assert problem in error.problem
    assert found in str(error.found)
    assert "run.yaml, line" in str(error.found)
    assert fix in error.fix


def test_a_value_that_the_command_line_gives_is_not_said_to_be_of_a_file(write: _Folder) -> None:
    (error,) = problems_of("--config", write("seed: -1"), "--seed", "-2")
    assert error.found == "--seed -2"


def test_a_contradiction_between_file_and_command_line_names_the_file(write: _Folder) -> None:
    (error,) = problems_of("--config", write("swiglu: true"), "--glu-activation", "geglu")
    assert str(error.found).startswith("--swiglu, --glu-activation geglu (--swiglu from ")


def test_files_that_cannot_be_read_are_reported_with_all_else(write: _Folder) -> None:
    bad, good = write("a: 1\n\tb: 2", "bad.yaml"), write("seed: -1", "good.yaml")
    errors = problems_of("--config", bad, "none.yaml", good, "--hidden-dropout", "2")
    assert [error.problem for error in errors] == [
        "a config file cannot be read as YAML",
        "a config file cannot be read",
        "a dropout probability is outside [0, 1)",
        "it cannot be negative",
    ]
    (error,) = problems_of("--config")
    assert error.problem == "no config file was named"


def test_groups_mean_nothing_and_each_title_of_the_help_is_one(
    write: _Folder, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(json.dumps({group: {} for group in GROUPS} | {"fp8": {"seed": 3}}), "a.json")
    assert parse_args([*COMMAND, "--config", path]).training.seed == 3
    with pytest.raises(SystemExit):
        parse_args(["--help"])
    text = without_times(capsys.readouterr().out)
    assert all(f"\n{group}:\n" in text for group in GROUPS)
