"""The complete JSON of a run: equal on all ranks, in TensorBoard, and in every checkpoint."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron.config.run import RECORDED_JSON, RunConfig
from megatron.initialize import initialize_megatron
from megatron.trained_model import load_model_for_inference
from tests.support.ranks import run_on_ranks
from tests.support.tiny import tiny_run, train, write_tiny_corpus


def trained(flags: dict[str, Any]) -> int:
    """Iterations that a run through DeepSpeed did."""
    return len(train(tiny_run(**flags)).losses)


def loaded_natively(folder: str) -> int:
    """Parameters of the model in a checkpoint, opened without DeepSpeed."""
    model = load_model_for_inference(folder, device="cpu").model
    return sum(parameter.numel() for parameter in model.parameters())


def refusal(corpus: str, folders: list[str]) -> str:
    """Return the error of a rank whose file of the same name differs from another rank's."""
    os.chdir(folders[dist.get_rank()])
    config = tiny_run(corpus, deepspeed=True, deepspeed_config="ds.json", fp64=False)
    try:
        initialize_megatron(config)
    except Exception as error:
        return str(error)
    return "nothing"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Documents to train on."""
    return write_tiny_corpus(tmp_path_factory.mktemp("corpus"))


def test_the_json_is_recorded_and_a_checkpoint_opens_without_deepspeed(
    corpus: str, tmp_path: Path
) -> None:
    file, save, board = tmp_path / "ds.json", tmp_path / "save", tmp_path / "board"
    file.write_text(json.dumps({"zero_optimization": {"stage": 1, "reduce_bucket_size": 4321}}))
    flags = {
        "corpus": corpus,
        "deepspeed": True,
        "deepspeed_config": str(file),
        "fp64": False,
        "train_iters": 1,
        "save": str(save),
        "tensorboard_dir": str(board),
    }
    assert run_on_ranks(1, trained, flags, deepspeed=True) == [1]
    file.unlink()  # a checkpoint is whole without it
    (manifest,) = save.glob("iter_*/manifest.json")
    config = json.loads(manifest.read_text())["config"]
    given = config[RECORDED_JSON]
    assert given["zero_optimization"]["reduce_bucket_size"] == 4321
    assert given["gradient_clipping"] == 0.5  # of the flags
    assert RunConfig.from_plain(config).engine.deepspeed_config == str(file)
    events = EventAccumulator(str(board))
    events.Reload()
    (text,) = events.Tensors("deepspeed/text_summary")
    assert '"reduce_bucket_size": 4321' in text.tensor_proto.string_val[0].decode()
    assert run_on_ranks(1, loaded_natively, str(save))[0] > 0


def test_ranks_whose_files_differ_do_not_start(corpus: str, tmp_path: Path) -> None:
    folders = []
    for rank, size in enumerate((100, 200)):
        folder = tmp_path / str(rank)
        folder.mkdir()
        values = {"zero_optimization": {"stage": 1, "reduce_bucket_size": size}}
        (folder / "ds.json").write_text(json.dumps(values))
        folders.append(str(folder))
    for message in run_on_ranks(2, refusal, corpus, folders):
        assert "the ranks do not run the same thing" in message
        assert "DeepSpeed's JSON: " in message
        assert "flags: " not in message
