"""--checkpoint-format deepspeed through real runs: saved by DeepSpeed, committed and read by us."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.checkpoint.boxes import whole as whole_box
from megatron.checkpoint.formats.deepspeed import save as deepspeed_save
from megatron.checkpoint.formats.deepspeed.source import DeepSpeedSource
from megatron.checkpoint.formats.deepspeed.universal import UniversalSource
from megatron.checkpoint.formats.registry import locate
from megatron.checkpoint.source import SourceOptions
from megatron.config.run import RunConfig
from megatron.errors import CheckpointError
from tests.support.checkpoints.deepspeed_folders import convert
from tests.support.ranks import run_on_ranks
from tests.support.tiny import (
    BF16,
    FP32,
    Record,
    assert_close,
    tiny_run,
    train_all,
    whole,
    write_tiny_corpus,
)

STEPS, SAVED_AT = 4, 2
DEADLINE_S = 240.0
SHAPE = {"deepspeed": True, "fp64": False, "micro_batch_size": 2, "train_iters": STEPS}
GLU = {"swiglu": True, "ffn_hidden_size": 24}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_tiny_corpus(tmp_path_factory.mktemp("corpus"))


def run(corpus: str, **flags: Any) -> RunConfig:
    return tiny_run(corpus, **(SHAPE | flags))


def ranks(world: int, *configs: RunConfig) -> list[list[Record]]:
    """Of several runs in the same processes, what each did on every rank."""
    found = run_on_ranks(
        world, train_all, configs, timeout_s=DEADLINE_S, deepspeed=configs[0].engine.deepspeed
    )
    return [list(records) for records in zip(*found)]


@pytest.mark.parametrize(
    ("world", "flags", "other_world", "other"),
    [
        pytest.param(
            2, {"zero_stage": "1", "bf16": True}, 1, {"deepspeed": False, "bf16": True},
            marks=pytest.mark.wide,
        ),
        (
            2,
            {"zero_stage": "3"} | GLU,
            2,
            {"zero_stage": "1", "tensor_model_parallel_size": 2} | GLU,
        ),
        pytest.param(
            2, {"zero_stage": "0", "bf16": True, "tensor_model_parallel_size": 2} | GLU,
            1, {"deepspeed": False, "bf16": True} | GLU,
            marks=pytest.mark.wide,
        ),
        (
            4,
            {"zero_stage": "1", "pipeline_model_parallel_size": 2,
             "tensor_model_parallel_size": 2},
            2,
            {"deepspeed": False, "use_distributed_optimizer": True},
        ),
    ],
    ids=["zero1-dp2-bf16", "zero3-dp2", "zero0-tp2-bf16", "zero1-pp2-tp2"],
)  # fmt: skip
def test_a_run_goes_on_bit_for_bit_and_at_another_layout_or_in_the_native_engine(
    world: int,
    flags: dict[str, Any],
    other_world: int,
    other: dict[str, Any],
    corpus: str,
    tmp_path: Path,
) -> None:
    # So that generators matter, and groups of parameters.
    dropout = {"hidden_dropout": 0.1, "decoupled_lr": 0.02}
    save = str(tmp_path / "save")
    saving = {"checkpoint_format": "deepspeed", "save": save, "exit_interval": SAVED_AT}
    straight, _, resumed = ranks(
        world,
        run(corpus, **flags, **dropout),
        run(corpus, **flags, **dropout, **saving),
        run(corpus, **flags, **dropout, load=save),
    )
    assert resumed[0].losses == straight[0].losses[SAVED_AT:]
    expected, found = whole(straight), whole(resumed)
    assert expected.keys() == found.keys()
    for name, values in found.items():
        assert torch.equal(values, expected[name]), name
    assert resumed[0].scalars == straight[0].scalars
    assert resumed[0].progress == straight[0].progress
    # Elsewhere dropout draws other numbers, so the next loss is compared with dropout off.
    (elsewhere,) = ranks(other_world, run(corpus, load=save, hidden_dropout=0.0, **other))
    (here,) = ranks(world, run(corpus, load=save, hidden_dropout=0.0, **flags))
    tolerance = BF16 if flags.get("bf16") else FP32
    assert_close(elsewhere[0].losses, here[0].losses, tolerance)
    assert elsewhere[0].progress == here[0].progress


def test_both_trackers_name_the_folder_and_deepspeeds_converter_takes_it(
    corpus: str, tmp_path: Path
) -> None:
    flags = {"zero_stage": "1", "pipeline_model_parallel_size": 2} | GLU
    save = tmp_path / "save"
    ranks(2, run(corpus, train_iters=2, save=str(save), checkpoint_format="deepspeed", **flags))
    assert (save / "latest").read_text() == "global_step2"
    assert (save / "latest_checkpointed_iteration.txt").read_text() == "2\n"
    folder = locate(save)
    assert folder == save / "global_step2"
    assert [name for name in os.listdir(save) if name.startswith(".")] == []
    with DeepSpeedSource(folder, SourceOptions()) as source:
        source.verify()
        assert source.progress["consumed_samples"] == 16
        converted = UniversalSource(convert(folder), SourceOptions())
        assert set(converted.tensors) == set(source.tensors)
        for name, described in source.tensors.items():
            box = whole_box(described.global_shape)
            assert torch.equal(source.read(name, box), converted.read(name, box)), name


def test_a_flipped_byte_is_found_before_anything_is_loaded(corpus: str, tmp_path: Path) -> None:
    save = tmp_path / "save"
    flags = {"zero_stage": "2", "checkpoint_format": "deepspeed"}
    ranks(1, run(corpus, train_iters=1, save=str(save), **flags))
    for path in sorted((save / "global_step1").iterdir()):
        good = path.read_bytes()
        bad = bytearray(good)
        bad[len(good) // 2] ^= 0x10
        path.write_bytes(bytes(bad))
        with pytest.raises(CheckpointError, match=path.name):
            DeepSpeedSource(save / "global_step1", SourceOptions()).verify()
        path.write_bytes(good)
    DeepSpeedSource(save / "global_step1", SourceOptions()).verify()


def test_older_ones_go_and_from_a_damaged_one_a_run_goes_back_to_the_one_before(
    corpus: str, tmp_path: Path
) -> None:
    save, flags = tmp_path / "save", {"zero_stage": "1", "hidden_dropout": 0.1}
    saving = {"checkpoint_format": "deepspeed", "save_interval": 1, "exit_interval": 3}
    straight, _ = ranks(
        2,
        run(corpus, **flags),
        run(corpus, **flags, **saving, save=str(save), keep_last=2),
    )
    assert {"global_step2", "global_step3"} == {p.name for p in save.iterdir() if p.is_dir()}
    (path,) = (save / "global_step3").glob("zero_pp_rank_1_*_optim_states.pt")
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x10
    path.write_bytes(content)
    found = run_on_ranks(2, _error_of_load, run(corpus, **flags, load=str(save)), deepspeed=True)
    assert found[0] == found[1]
    assert f"{path}: expected xxh3" in found[0]
    (save / "latest_checkpointed_iteration.txt").write_text("three")  # nor can that be followed
    (resumed,) = ranks(2, run(corpus, **flags, load=str(save), load_fallback="previous"))
    assert resumed[0].losses == straight[0].losses[2:]
    ours, expected = whole(resumed), whole(straight)
    assert [name for name in expected if not torch.equal(ours[name], expected[name])] == []
    for path in save.glob("global_step*/megatron.json"):
        path.write_bytes(b"{}")
    refused = run(corpus, **flags, load=str(save), load_fallback="previous")
    (messages, _) = run_on_ranks(2, _error_of_load, refused, deepspeed=True)
    assert "no checkpoint in the folder is whole" in messages
    assert messages.index("iteration 3: ") < messages.index("iteration 2: ")


def _error_of_load(config: RunConfig) -> str:
    try:
        train_all([config])
    except CheckpointError as error:
        return str(error)
    raise AssertionError("it was loaded")


def test_a_rank_whose_disk_is_full_fails_the_save_on_all_and_the_former_stays(
    corpus: str, tmp_path: Path
) -> None:
    save = tmp_path / "save"
    flags = {"zero_stage": "1", "checkpoint_format": "deepspeed", "save_interval": 1}
    config = run(corpus, train_iters=2, save=str(save), **flags)
    messages = run_on_ranks(2, _second_save_fails_on_rank_1, config, timeout_s=120, deepspeed=True)
    assert all("no space left" in words.lower() for words in messages), messages
    assert sorted(os.listdir(save / "global_step1"))
    assert not (save / "global_step2").exists()
    assert [name for name in os.listdir(save) if name.startswith(".")] == []
    assert (save / "latest").read_text() == "global_step1"


def _second_save_fails_on_rank_1(config: RunConfig) -> str:
    real = deepspeed_save.DurableWriter.save

    def failing(writer: deepspeed_save.DurableWriter, content: Any, path: str) -> None:
        if "global_step2" in path and torch.distributed.get_rank() == 1:
            writer.error = OSError(errno.ENOSPC, "No space left on device", path)
        real(writer, content, path)

    deepspeed_save.DurableWriter.save = failing  # type: ignore[method-assign]
    try:
        train_all([config])
    except CheckpointError as error:
        return str(error)
    raise AssertionError("the save did not fail")
