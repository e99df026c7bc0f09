"""Missing fields of a foreign checkpoint take our defaults; missing required ones are errors."""

from pathlib import Path

import pytest

from megatron.checkpoint.load.source_config import completed_config, completed_progress
from megatron.checkpoint.source import SourceBase
from megatron.config.run import RunConfig
from megatron.errors import CheckpointError
from tests.support.checkpoints.sources import MemorySource


def test_a_model_and_a_length_are_enough_for_a_whole_config() -> None:
    source = MemorySource.of_gpt()
    config = RunConfig.from_plain(completed_config(source))
    assert config.model.num_layers == source.config["model"]["num_layers"]
    assert config.tokenizer.tokenizer_type == "NullTokenizer"
    rows = source.tensors["model/embedding.word.weight"].global_shape[0]
    assert config.tokenizer.vocab_size == rows - 1


def test_flags_that_it_knows_stay_and_a_run_in_samples_stays_one() -> None:
    source = MemorySource.of_gpt()
    source.config["training"] = {"train_samples": 100, "micro_batch_size": 4}
    source.config["extra"] = {"mine": 1}
    config = RunConfig.from_plain(completed_config(source))
    assert (config.training.train_samples, config.training.train_iters) == (100, None)
    assert config.extra == {"mine": 1}


def test_a_checkpoint_that_does_not_know_its_model_is_refused() -> None:
    source = MemorySource.of_gpt()
    del source.config["model"]["hidden_size"]
    with pytest.raises(CheckpointError, match="does not record enough about its model") as caught:
        completed_config(source)
    assert "hidden_size" in str(caught.value.found)


def test_progress_is_filled_with_zeros() -> None:
    source = MemorySource.of_gpt()
    source.progress = {"consumed_samples": 80}
    assert completed_progress(source, 10) == {
        "iteration": 10,
        "consumed_samples": 80,
        "consumed_tokens": 0,
        "consumed_valid_samples": 0,
        "skipped_iterations": 0,
        "nonfinite_in_a_row": 0,
    }


def test_a_source_base_closes_nothing_and_checks_nothing() -> None:
    with SourceBase() as source:
        source.verify(share=0, of=2)
    assert isinstance(MemorySource.of_gpt().directory, Path)


def test_flags_beside_it_are_right_where_it_says_nothing() -> None:
    source = MemorySource.of_gpt()
    known = source.config["model"].pop("num_layers")
    fallback = {"model": {"num_layers": known, "hidden_size": 1000}}
    config = RunConfig.from_plain(completed_config(source, fallback))
    assert config.model.num_layers == known
    assert config.model.hidden_size == source.config["model"]["hidden_size"]
