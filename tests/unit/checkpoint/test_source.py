"""What every format shares: which iteration is written, and options with sensible defaults."""

import dataclasses

from megatron.checkpoint.bert_tensors import BertHeads
from megatron.checkpoint.folder.manifest import GridLayout, Manifest
from megatron.checkpoint.source import SourceOptions, WriteOptions
from tests.support.checkpoints.sources import MemorySource


def test_the_iteration_is_the_one_asked_for_or_the_sources_own_or_0() -> None:
    source = MemorySource.of_gpt(optimizer=True)
    assert WriteOptions(iteration=3).iteration_of(source) == 3
    assert WriteOptions().iteration_of(source) == 10
    assert WriteOptions().iteration_of(MemorySource.of_gpt()) == 0


def test_nothing_is_known_about_the_vocabulary_unless_it_is_said() -> None:
    assert SourceOptions().vocab_size is None


def test_the_kind_is_what_a_run_of_ours_recorded_or_what_names_tell() -> None:
    source = MemorySource.of_bert(BertHeads())
    assert source.kind == "bert"
    assert MemorySource.of_gpt().kind == "gpt"
    source.seal = Manifest(
        1, GridLayout(1, 1, 1), {}, {}, {}, {}, {}, (), {}, created="", model_kind="mine"
    )
    assert source.kind == "mine"
    source.seal = dataclasses.replace(source.seal, model_kind=None)  # of an older version
    assert source.kind == "bert"
