"""Flags that a checkpoint records are those of a run that begins with it."""

import shutil
from pathlib import Path

import pytest

from megatron.arguments import parse_args
from megatron.checkpoint.load.stored_run import flags_of_checkpoint, stored_run
from megatron.config.run import RunConfig
from megatron.errors import CheckpointError, ConfigError, PreflightError
from tests.support.checkpoints.hf_models import POSITIONS, VOCABULARY, save_case
from tests.support.checkpoints.megatron_files import Shape, save_megatron, whole_model
from tests.support.ranks import run_on_ranks
from tests.support.tiny import tiny_run, train_all, write_tiny_corpus

pytestmark = pytest.mark.slow
TRAINING = ["--mock-data", "--micro-batch-size", "1", "--train-iters", "1", "--lr", "0.01"]
SHAPE = Shape(layers=2, args={"seq_length": 12})


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    """The flags of a run of two ranks, whose checkpoint lies in its --save."""
    folder = tmp_path_factory.mktemp("ours")
    flags = {"tensor_model_parallel_size": 2, "swiglu": True, "train_iters": 1}
    run = tiny_run(write_tiny_corpus(folder / "corpus"), save=str(folder / "run"), **flags)
    run_on_ranks(2, train_all, [run])
    return run


@pytest.fixture
def megatron(tmp_path: Path) -> str:
    return str(save_megatron(tmp_path / "megatron", whole_model(SHAPE), SHAPE))


def begun(folder: str, *words: str) -> RunConfig:
    """A run that begins with a checkpoint, and the flags beside it."""
    given = ["--load", folder, "--finetune", "--use-checkpoint-args"]
    return parse_args([*TRAINING, *given, *words])


def test_a_run_of_ours_is_described_whole(
    ours: RunConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(ours.checkpoint.save)
    assert stored_run(folder).config == stored_run(folder, 1).config == ours
    with pytest.raises(CheckpointError, match="4"):
        stored_run(folder, 4)
    capsys.readouterr()
    run = begun(folder)
    assert (run.model, run.tokenizer) == (ours.model, ours.tokenizer)
    assert run.data.seq_length == ours.data.seq_length
    assert run.parallel.tensor_model_parallel_size == 1
    assert run.precision != ours.precision, "how to train is for the flags to say"
    said = capsys.readouterr().out
    assert f"from the checkpoint in {folder}: --num-layers 2" in said
    assert "--swiglu" in said
    assert begun(folder, "--load-iteration", "1").model == ours.model


def test_the_layout_is_taken_where_it_is_asked_for(ours: RunConfig, megatron: str) -> None:
    run = begun(str(ours.checkpoint.save), "--use-mp-args-from-checkpoint-args")
    assert run.parallel == ours.parallel
    with pytest.raises(ConfigError, match="does not record the layout") as caught:
        begun(megatron, "--use-mp-args-from-checkpoint-args")
    assert "--tensor-model-parallel-size" in str(caught.value.fix)


def test_a_folder_of_hugging_face_needs_no_flags_of_its_model(tmp_path: Path) -> None:
    folder = str(save_case("llama", tmp_path / "llama"))
    run = begun(folder)
    assert (run.model.num_layers, run.model.hidden_size, run.model.swiglu) == (2, 32, True)
    assert run.data.seq_length == POSITIONS
    assert run.tokenizer.vocab_size == VOCABULARY - 1
    own = ["--tokenizer-type", "ByteTokenizer"]
    assert begun(folder, *own).tokenizer.vocab_size is None
    unnamed = begun(folder, "--no-use-tokenizer-model-from-checkpoint-args", *own)
    assert unnamed.tokenizer.true_vocab_size is None


def test_files_of_megatron_need_no_flags_of_their_model(megatron: str) -> None:
    run = begun(megatron, "--tokenizer-type", "NullTokenizer", "--vocab-size", "40")
    found = (run.model.num_layers, run.model.hidden_size, run.model.ffn_hidden_size)
    assert found == (SHAPE.layers, SHAPE.hidden, SHAPE.ffn)
    assert run.tokenizer.tokenizer_type == "NullTokenizer"


def test_flags_beside_the_checkpoint_win(ours: RunConfig) -> None:
    run = begun(str(ours.checkpoint.save), "--seq-length", "8", "--hidden-dropout", "0.5")
    assert (run.data.seq_length, run.model.hidden_dropout) == (8, 0.5)


def test_without_a_checkpoint_all_flags_are_those_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    here = str(tmp_path)
    for given in ({}, {"load": here, "save": here}):
        assert flags_of_checkpoint(given) == {}
        assert "there is no checkpoint yet" in capsys.readouterr().out
    weights = str(save_case("gpt2", tmp_path / "gpt2"))
    taken = flags_of_checkpoint({"load": here, "pretrained_checkpoint": weights})
    assert taken["num_layers"] == 2
    with pytest.raises(PreflightError, match="no --num-layers"):
        parse_args([*TRAINING, "--use-checkpoint-args"])


def test_a_checkpoint_that_cannot_be_read_is_all_that_is_said(
    ours: RunConfig, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match="empty"):
        begun(str(tmp_path / "empty"))
    damaged = tmp_path / "damaged"
    shutil.copytree(str(ours.checkpoint.save), damaged)
    next(damaged.glob("iter_*/manifest.json")).write_text("{")
    with pytest.raises(CheckpointError, match=r"manifest\.json"):
        begun(str(damaged))
