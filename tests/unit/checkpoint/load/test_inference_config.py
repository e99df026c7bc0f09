"""Which flags may change a checkpoint's config, which may not, and which have no effect."""

import dataclasses
from typing import Any

import pytest

from megatron.arguments import parse_given
from megatron.checkpoint.load.inference_config import (
    Inference,
    inference_config,
    values_from_command_line,
)
from megatron.config.fp8 import Fp8Config
from megatron.config.models.encoder_decoder import EncoderDecoderConfig
from megatron.config.precision import Precision
from megatron.config.run import RunConfig
from megatron.config.runtime import DeviceKind
from megatron.errors import CheckpointError, ConfigError
from tests.support.tiny import tiny_run

# As the scripts of Megatron-LM that evaluate a GPT have them.
SCRIPT = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 4 --seq-length 16 "
    "--max-position-embeddings 16 --micro-batch-size 8 --activations-checkpoint-method uniform "
    "--log-interval 10 --no-load-optim --no-load-rng --fp16 --DDP-impl local"
)


def used(words: str, stored: RunConfig | None = None, **flags: Any) -> Inference:
    return inference_config(
        stored or tiny_run("corpus", **flags), parse_given(words.split()), load="folder"
    )


def test_without_flags_a_checkpoint_is_used_as_it_was_trained() -> None:
    stored = tiny_run("corpus", tensor_model_parallel_size=2, bf16=True)
    use = used("", stored)
    assert use.config.model == stored.model
    assert use.config.precision == stored.precision
    assert use.config.parallel.tensor_model_parallel_size == 1
    assert use.config.checkpoint.load == "folder"
    assert (use.window, use.notes) == (None, ())


def test_a_script_of_megatron_says_the_same_as_the_checkpoint() -> None:
    use = used(SCRIPT)
    assert use.config.precision.precision is Precision.FP16
    assert use.config.training.micro_batch_size == 8
    assert use.window == 16
    assert use.notes == (
        "computing in float16; the checkpoint is of float64",
        "without effect, as nothing is trained: --recompute-granularity full, "
        "--recompute-method uniform, --log-interval 10, --no-load-optim, --no-load-rng",
    )


def test_experts_are_shared_out_where_a_program_makes_the_same_passes_on_all_ranks() -> None:
    stored = tiny_run("corpus", num_experts=4, add_bias_linear=False, swiglu=True)
    both = ["--expert-model-parallel-size", "2", "--expert-tensor-parallel-size", "1"]
    alike = inference_config(stored, parse_given(both), load="folder", shares_experts=True)
    assert alike.config.parallel.expert_tensor_parallel_size == 1
    given = parse_given(both[:2])
    alike = inference_config(stored, given, load="folder", shares_experts=True)
    assert alike.config.parallel.expert_model_parallel_size == 2
    assert alike.notes == ()
    other = inference_config(stored, given, load="folder")
    assert other.config.parallel.expert_model_parallel_size == 1
    assert other.notes == ("without effect, as nothing is trained: --expert-model-parallel-size 2",)


def test_experts_of_a_model_in_use_take_all_tokens() -> None:
    capacity = {"moe_expert_capacity_factor": 1.0, "moe_eval_capacity_factor": 2.0}
    experts = {"num_experts": 4, "add_bias_linear": False, "swiglu": True}
    stored = tiny_run("corpus", **experts, **capacity)
    use = used("--moe-expert-capacity-factor 3", stored)
    assert use.config.model == tiny_run("corpus", **experts).model
    dropless, ignored = use.notes
    assert "no token is dropped" in dropless
    assert "--moe-expert-capacity-factor 3.0" in ignored


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--num-layers 3", "--num-layers 3 given, 2 stored"),
        # No model together with the checkpoint's width; still it is the heads that are wrong.
        ("--num-attention-heads 3", "--num-attention-heads 3 given, 4 stored"),
        ("--swiglu", "--swiglu given, False stored"),
        ("--disable-bias-linear --openai-gelu", "--no-add-bias-linear given, True stored"),
        (
            "--position-embedding-type rope",
            "--position-embedding-type rope given, learned_absolute stored",
        ),
        ("--max-position-embeddings 32", "--max-position-embeddings 32 given, 16 stored"),
    ],
)
def test_another_model_is_refused_with_both_values(words: str, expected: str) -> None:
    with pytest.raises(CheckpointError, match="describe different models") as caught:
        used(words)
    assert expected in str(caught.value.found)


def test_other_spellings_of_the_same_model_are_the_same() -> None:
    used("--ffn-hidden-size 64 --kv-channels 4 --num-key-value-heads 4 --openai-gelu")
    used("--glu-activation swiglu", swiglu=True, ffn_hidden_size=24)
    note = used("--hidden-dropout 0.3").notes
    assert note == ("without effect, as nothing is trained: --hidden-dropout 0.3",)


def test_minus_one_means_the_checkpoints() -> None:
    use = used("--num-layers -1 --hidden-size -1 --seq-length -1")
    assert use.config.model.num_layers == 2
    assert use.window is None
    assert use.notes == (
        "taken from the checkpoint: --num-layers -1, --hidden-size -1, --seq-length -1",
    )


@pytest.mark.parametrize("length", [0, 17])
def test_rows_end_where_the_positions_do(length: int) -> None:
    with pytest.raises(ConfigError, match="cannot read rows of that length") as caught:
        used(f"--seq-length {length}")
    assert caught.value.fix == "use a whole number from 1 to 16"


def test_positions_without_a_table_may_go_further() -> None:
    rope = {"position_embedding_type": "rope"}
    assert used("--seq-length 99", **rope).window == 99
    assert used("--max-position-embeddings 32", **rope).config.model.max_position_embeddings == 32
    with pytest.raises(ConfigError, match="cannot read rows of that length"):
        used("--max-position-embeddings 32 --seq-length 33", **rope)
    with pytest.raises(ConfigError, match="cannot read rows of that length"):
        used("--seq-length 0", **rope)


def test_stages_of_a_training_do_not_decide_where_a_decoder_begins_now() -> None:
    decoder = EncoderDecoderConfig(
        decoder_num_layers=2, decoder_seq_length=9, pipeline_model_parallel_split_rank=1
    )
    found = used(
        "", dataclasses.replace(tiny_run("corpus"), encoder_decoder=decoder)
    ).config.encoder_decoder
    assert found == EncoderDecoderConfig(decoder_num_layers=2, decoder_seq_length=9)


def test_text_is_generated_without_fp8() -> None:
    use = used("", bf16=True, fp8_format="hybrid")
    assert use.config.fp8 == Fp8Config()
    (note,) = use.notes
    assert note.startswith("computing without FP8")


def test_the_precision_is_that_of_the_flags() -> None:
    stored = {"bf16": True, "fp32_residual_connection": True}
    assert used("", **stored).config.precision.fp32_residual_connection
    assert used("--fp16", **stored).config.precision.fp32_residual_connection
    wide = used("--no-bf16", **stored)
    assert wide.config.precision.precision is Precision.FP32
    assert wide.notes == ("computing in float32; the checkpoint is of bfloat16",)
    with pytest.raises(ConfigError, match="more than one precision"):
        used("--fp16 --bf16", **stored)


def test_a_tokenizer_may_lie_elsewhere() -> None:
    gpt2 = {"tokenizer_type": "GPT2BPETokenizer", "vocab_size": None}
    stored = tiny_run("corpus", **gpt2, vocab_file="a.json", merge_file="a.txt", vocab_extra_ids=3)
    kept = used("--tokenizer-type GPT2BPETokenizer", stored).config.tokenizer
    assert kept == stored.tokenizer
    moved = used("--vocab-file b.json --merge-file b.txt", stored).config.tokenizer
    assert (moved.vocab_file, moved.merge_file, moved.vocab_extra_ids) == ("b.json", "b.txt", 3)
    other = used("--tokenizer-type HFTokenizer --tokenizer-name-or-path f", stored).config.tokenizer
    assert (other.vocab_file, other.tokenizer_name_or_path) == (None, "f")
    assert other.make_vocab_size_divisible_by == stored.tokenizer.make_vocab_size_divisible_by


def test_layout_and_machine_are_those_of_the_flags() -> None:
    words = "--tensor-model-parallel-size 2 --sequence-parallel --use-distributed-optimizer"
    use = used(f"{words} --device cpu --checkpoint-verify size --log-level error")
    assert use.config.parallel.tensor_model_parallel_size == 2
    assert use.config.parallel.sequence_parallel
    assert not use.config.parallel.use_distributed_optimizer
    assert use.config.launch.device is DeviceKind.CPU
    assert use.config.checkpoint.checkpoint_verify == "size"
    assert use.config.logging.log_level == "error"
    assert use.notes == ("without effect, as nothing is trained: --use-distributed-optimizer",)


def test_flags_speak_where_a_checkpoint_says_nothing() -> None:
    words = "--num-layers 2 --seq-length 8 --data-path x --hidden-size -1 --bf16"
    assert values_from_command_line(parse_given(words.split())) == {
        "model": {"num_layers": 2},
        "data": {"seq_length": 8},
        "tokenizer": {},
        "precision": {"bf16": True},
    }
