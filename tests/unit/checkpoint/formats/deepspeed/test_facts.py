"""The facts that a folder records about its run."""

from argparse import Namespace
from pathlib import Path

import pytest
import torch

from megatron.checkpoint.formats.deepspeed.facts import FolderFacts, scaler_fields
from megatron.checkpoint.formats.deepspeed.source import DeepSpeedSource
from megatron.checkpoint.source import SourceOptions
from megatron.errors import CheckpointError
from tests.unit.checkpoint.formats.deepspeed.toy import write_folder

ARGS = Namespace(num_layers=1, hidden_size=4, num_attention_heads=2, ffn_hidden_size=6,
                 max_position_embeddings=8, seq_length=8, consumed_train_samples=40)  # fmt: skip


def test_megatrons_flags_say_what_the_model_is_and_how_far_it_was() -> None:
    state = {"args": ARGS, "iteration": 5, "tokens": 320, "checkpoint_version": 0}
    facts = FolderFacts.of(state, SourceOptions(vocab_size=10))
    assert facts.config["model"]["hidden_size"] == 4
    assert facts.progress == {"iteration": 5, "consumed_samples": 40, "consumed_tokens": 320}
    assert facts.rows.version == 0  # not the latest, which is the default
    assert facts.vocab_rows == 10
    assert facts.grid is None
    assert FolderFacts.of({"global_steps": 3}, SourceOptions()).progress == {"iteration": 3}
    assert FolderFacts.of({}, SourceOptions()).rows.version == 3


def test_a_vocabulary_that_is_written_down_needs_no_option() -> None:
    info = {"checkpoint_info": {"original_vocab_size": 7}}
    assert FolderFacts.of(info, SourceOptions()).vocab_rows == 7


def test_deepspeeds_dynamic_loss_scale_becomes_ours() -> None:
    fresh = {"cur_scale": 64.0, "cur_iter": 0, "last_overflow_iter": -1, "scale_window": 10,
             "cur_hysteresis": 2}  # fmt: skip
    assert scaler_fields(fresh) == {"scale": 64.0, "good_iterations": 0, "overflows_left": 2}
    after_overflow = fresh | {"cur_iter": 6, "last_overflow_iter": 5, "cur_hysteresis": 1}
    assert scaler_fields(after_overflow)["good_iterations"] == 0
    later = Namespace(**(fresh | {"cur_iter": 18, "last_overflow_iter": 5}))
    assert scaler_fields(later)["good_iterations"] == 2  # of a window of 10, the second round
    assert scaler_fields(Namespace(cur_scale=1.0)) == {}
    assert scaler_fields(None) == {}


def test_a_model_that_is_not_the_one_of_the_flags_is_refused(tmp_path: Path) -> None:
    write_folder(tmp_path, record=False, state={"args": Namespace(**vars(ARGS)), "iteration": 1})
    path = tmp_path / "mp_rank_00_model_states.pt"
    state = torch.load(path, weights_only=False)
    names = {  # as Megatron-DeepSpeed calls them
        "embedding.word": "embedding.word_embeddings",
        "embedding.position": "embedding.position_embeddings",
        "layers.0.input_norm": "encoder.layers.0.input_layernorm",
        "layers.0.attention.qkv": "encoder.layers.0.self_attention.query_key_value",
        "layers.0.attention.output": "encoder.layers.0.self_attention.dense",
        "layers.0.post_attention_norm": "encoder.layers.0.post_attention_layernorm",
        "layers.0.mlp.fc1": "encoder.layers.0.mlp.dense_h_to_4h",
        "layers.0.mlp.fc2": "encoder.layers.0.mlp.dense_4h_to_h",
        "final_norm": "encoder.final_layernorm",
    }
    for share in tmp_path.glob("*optim_states.pt"):
        share.unlink()
    state["module"] = {
        f"language_model.{names[name.rpartition('.')[0]]}.{name.rpartition('.')[2]}": value
        for name, value in state["module"].items()
    }
    state |= {"dp_world_size": 1, "param_shapes": None}
    torch.save(state, path)
    source = DeepSpeedSource(tmp_path, SourceOptions(vocab_size=10))
    assert source.tensors["model/embedding.word.weight"].global_shape == (10, 4)
    assert source.scalars == {}
    left_out = dict(state)
    left_out["module"] = {n: v for n, v in state["module"].items() if "dense_4h" not in n}
    torch.save(left_out, path)
    with pytest.raises(CheckpointError, match=r"does not hold the model that it.*\n.*missing"):
        DeepSpeedSource(tmp_path, SourceOptions(vocab_size=10))
    torch.save(state | {"args": Namespace(**(vars(ARGS) | {"ffn_hidden_size": 8}))}, path)
    with pytest.raises(CheckpointError, match=r"mlp.fc1.weight is \[6, 4\], not \[8, 4\]"):
        DeepSpeedSource(tmp_path, SourceOptions(vocab_size=10))
