"""Model keys of Megatron core are our names, one of a layer or of all layers at once."""

import pytest

from megatron.checkpoint.formats.torch_dist import names


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("embedding.word_embeddings.weight", [("embedding.word.weight", ())]),
        ("decoder.final_layernorm.bias", [("final_norm.bias", ())]),
        ("lm_head.layer_norm.weight", [("lm_head.norm.weight", ())]),
        (
            "decoder.layers.self_attention.linear_qkv.layer_norm_weight",
            [("layers.0.input_norm.weight", (0,)), ("layers.1.input_norm.weight", (1,))],
        ),
        (
            "encoder.layers.mlp.linear_fc2.bias",
            [("layers.0.mlp.fc2.bias", (0,)), ("layers.1.mlp.fc2.bias", (1,))],
        ),
        ("decoder.layers.7.mlp.router.weight", [("layers.7.mlp.router.weight", ())]),
        (
            "decoder.layers.3.mlp.experts.experts.linear_fc1.weight",
            [("layers.3.mlp.experts.fc1.weight", ())],
        ),
        (
            "decoder.layers.3.mlp.shared_experts.gate_weight",
            [("layers.3.mlp.shared_expert.gate", ())],
        ),
        ("decoder.layers.self_attention.linear_q_down_proj.weight", []),
        ("mtp.layers.0.enorm.weight", []),
    ],
)
def test_keys_are_told_with_their_layers(key: str, expected: list[object]) -> None:
    assert list(names.our_names(key, 2)) == expected


@pytest.mark.parametrize(
    ("key", "kind"),
    [
        ("optimizer.state.exp_avg.decoder.layers.mlp.linear_fc1.weight", "exp_avg"),
        ("optimizer.state.exp_avg_sq.output_layer.weight", "exp_avg_sq"),
        ("chained_0.optimizer.state.fp32_param.output_layer.weight", "master"),
        ("optimizer.state.param.output_layer.weight", "master"),
    ],
)
def test_optimizer_state_is_told_by_kind(key: str, kind: str) -> None:
    state = names.state_key(key)
    assert state is not None
    assert state.kind == kind
    assert list(names.our_names(state.model_key, 1))
    assert names.is_optimizer(key)


def test_buffers_of_ranks_are_no_state_by_model_key() -> None:
    key = "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_0.bucket_idx_0.exp_avg"
    assert names.state_key(key) is None
    assert names.is_optimizer(key)
    assert not names.is_optimizer("decoder.layers.mlp.linear_fc1.weight")


def test_experts_come_after_the_attention_of_their_layer() -> None:
    ordered = [
        "embedding.word.weight",
        "layers.0.attention.output.weight",
        "layers.0.mlp.experts.fc1.weight",
        "layers.0.mlp.router.weight",
        "layers.1.input_norm.weight",
        "final_norm.weight",
    ]
    assert sorted(reversed(ordered), key=names.model_order) == ordered
