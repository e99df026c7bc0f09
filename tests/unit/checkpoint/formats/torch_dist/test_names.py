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


@pytest.mark.parametrize(
    ("ours", "stacked", "alone"),
    [
        ("embedding.word.weight", "embedding.word_embeddings.weight", None),
        ("final_norm.bias", "decoder.final_layernorm.bias", None),
        ("output_bias.bias", "output_layer.bias", None),
        ("order_head.dense.weight", "binary_head.weight", None),
        ("lm_head.norm.weight", "lm_head.layer_norm.weight", None),
        ("pooler.dense.bias", "pooler.dense.bias", None),
        (
            "layers.3.input_norm.weight",
            "decoder.layers.self_attention.linear_qkv.layer_norm_weight",
            "decoder.layers.3.self_attention.linear_qkv.layer_norm_weight",
        ),
        (
            "layers.3.mlp.experts.fc1.weight",
            "decoder.layers.mlp.experts.experts.linear_fc1.weight",
            "decoder.layers.3.mlp.experts.experts.linear_fc1.weight",
        ),
    ],
)
def test_our_names_have_keys_stacked_or_alone(ours: str, stacked: str, alone: str | None) -> None:
    for is_stacked, key in ((True, stacked), (False, alone or stacked)):
        found = names.core_keys(ours, trunk="decoder", is_stacked=is_stacked, has_experts=False)
        assert list(found) == [key]
        back = [name for name, _ in names.our_names(key, 4)]
        assert ours in back


def test_the_norm_before_experts_has_the_keys_of_both_kinds_of_modules() -> None:
    found = names.core_keys(
        "layers.1.post_attention_norm.weight", trunk="decoder", is_stacked=True, has_experts=True
    )
    assert list(found) == [
        "decoder.layers.mlp.linear_fc1.layer_norm_weight",
        "decoder.layers.pre_mlp_layernorm.weight",
    ]


def test_what_core_does_not_have_has_no_key() -> None:
    for ours in ("embedding.norm.weight", "layers.0.attention.sinks", "scale.weight"):
        keys = names.core_keys(ours, trunk="decoder", is_stacked=True, has_experts=False)
        assert list(keys) == []


@pytest.mark.parametrize(
    ("key", "shape", "expected"),
    [
        ("decoder.layers.mlp.linear_fc1.weight", (2, 8, 4), ["0_2", "1_2"]),
        ("decoder.layers.1.mlp.linear_fc1.weight", (8, 4), ["0_1"]),
        (
            "decoder.layers.mlp.experts.experts.linear_fc2.weight",
            (1, 2, 4, 8),
            ["0.0_1.2", "0.1_1.2"],
        ),
        ("decoder.layers.5.mlp.experts.experts.linear_fc2.weight", (2, 4, 8), ["0_2", "1_2"]),
        ("decoder.layers.mlp.linear_fc1.bias", (2, 8), []),
        ("decoder.layers.mlp.router.weight", (2, 4, 8), []),
        ("output_layer.weight", (8, 4), []),
    ],
)
def test_linear_layers_have_a_state_beside_them(
    key: str, shape: tuple[int, ...], expected: list[str]
) -> None:
    module = key.rpartition(".")[0]
    found = list(names.extra_state_keys(key, shape))
    assert found == [f"{module}._extra_state/shard_{end}" for end in expected]
