"""T5 against the one of transformers, and what must hold whatever the weights are."""

import dataclasses
from collections.abc import Mapping
from itertools import pairwise

import pytest
import torch

from megatron.config.activations import ActivationPolicy, RecomputeMethod, RecomputeModule
from megatron.config.model import PositionEmbedding, SoftmaxType
from megatron.config.models.encoder_decoder import EncoderDecoderConfig
from megatron.errors import ConfigError
from megatron.model.losses import LossSum
from megatron.model.specs import ModelBuild
from megatron.model.stage import PipelineStage, ends_of_blocks
from megatron.model.t5_model import T5Model, t5_carry, t5_layers, t5_loss
from megatron.mpu.context import ParallelContext
from megatron.mpu.stage_plan import LayerRange
from megatron.mpu.topology import Topology
from tests.support.models import TINY_VOCAB, tiny_build, tiny_config
from tests.support.t5.models import (
    T5_1_0,
    T5_1_1,
    TINY_DECODER,
    in_transformers,
    tiny_rows,
    tiny_t5,
)

# float64 on both sides: only the order of additions differs.
SAME = {"rtol": 1e-10, "atol": 1e-10}
# transformers computes the statistics of its norms in float32, also in a float64 model.
FP32_NORMS = {"rtol": 0.0, "atol": 1e-6}
MODELS: Mapping[str, Mapping[str, object]] = {
    "1.0": T5_1_0,
    "1.1": T5_1_1,
    "megatron": {},
    "rope, groups": {"position_embedding_type": PositionEmbedding.ROPE, "num_query_groups": 2},
    "alibi": {"position_embedding_type": PositionEmbedding.ALIBI},
}


@pytest.mark.parametrize("flags", [T5_1_0, T5_1_1], ids=["1.0", "1.1"])
def test_scores_are_those_of_transformers(flags: Mapping[str, object]) -> None:
    ours = tiny_t5(**flags).eval()
    tokens, padding, answers = tiny_rows()
    logits = ours(tokens, padding, answers)
    with torch.no_grad():
        expected = in_transformers(ours)(
            input_ids=tokens, attention_mask=padding, decoder_input_ids=answers
        ).logits
    found = logits.transpose(0, 1)[..., : TINY_VOCAB.true]
    torch.testing.assert_close(found, expected, **FP32_NORMS)


@pytest.mark.parametrize("flags", MODELS.values(), ids=MODELS)
def test_what_stands_in_the_padding_changes_nothing(flags: Mapping[str, object]) -> None:
    model = tiny_t5(**flags).eval()
    tokens, padding, answers = tiny_rows()
    other = torch.where(padding.bool(), tokens, (tokens + 7) % TINY_VOCAB.true)
    assert not torch.equal(tokens, other)
    assert torch.equal(model(tokens, padding, answers), model(other, padding, answers))


@pytest.mark.parametrize("flags", MODELS.values(), ids=MODELS)
def test_a_decoder_sees_all_of_the_encoder_and_nothing_behind_itself(
    flags: Mapping[str, object],
) -> None:
    model = tiny_t5(**flags).eval()
    tokens, padding, answers = tiny_rows()
    before = model(tokens, padding, answers)
    later = answers.clone()
    later[:, 4] = (later[:, 4] + 1) % TINY_VOCAB.true
    after = model(tokens, padding, later)
    assert torch.equal(before[:4], after[:4])
    assert (before[4:] != after[4:]).any(-1).all()
    first = tokens.clone()
    first[:, 0] = (first[:, 0] + 1) % TINY_VOCAB.true
    last = tokens.clone()
    last[0, 8], last[1, 5] = (last[0, 8] + 1) % 50, (last[1, 5] + 1) % 50
    for changed in (first, last):
        assert (before != model(changed, padding, answers)).any(-1).all()


@pytest.mark.parametrize("flags", MODELS.values(), ids=MODELS)
def test_every_parameter_has_a_gradient(flags: Mapping[str, object]) -> None:
    model = tiny_t5(**flags)
    tokens, padding, answers = tiny_rows()
    loss = model(tokens, padding, answers, answers)
    assert isinstance(loss, LossSum)
    loss.total.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"attention_soft_cap": 2.0},
    ],
)
def test_gradients_of_relative_positions_are_differences_of_losses(
    changes: Mapping[str, object],
) -> None:
    model, rows, step = tiny_t5(**T5_1_0, **changes), tiny_rows(), 1e-5
    loss = model(*rows, rows[2])
    assert isinstance(loss, LossSum)
    loss.total.backward()
    for stack in ("encoder", "decoder"):
        table = model.get_parameter(f"{stack}.relative_positions.weight")
        assert table.grad is not None
        found = float(table.grad[1, 2])
        totals = []
        with torch.no_grad():
            for change in (step, -2 * step):
                table[1, 2] += change
                totals.append(float(model(*rows, rows[2]).total))
            table[1, 2] += step
        assert found == pytest.approx((totals[0] - totals[1]) / (2 * step), rel=1e-5)


@pytest.mark.parametrize("flags", [T5_1_0, {}], ids=["1.0", "megatron"])
def test_stages_of_the_list_compute_what_the_whole_does(flags: Mapping[str, object]) -> None:
    build = tiny_build()
    whole = tiny_t5(build, **flags).eval()
    specs = t5_layers(whole.config, build, TINY_DECODER)
    carry = t5_carry(*tiny_rows())
    for start, stop in pairwise(range(len(specs) + 1)):  # cut everywhere
        stage = PipelineStage(specs, [LayerRange(start, stop)]).eval()
        stage.load_state_dict({n: whole.state_dict()[n] for n in stage.state_dict()})
        carry = stage(carry)
    assert torch.equal(carry[0], whole(*tiny_rows()))
    assert len(carry) == 1


def test_what_is_encoded_once_can_be_decoded() -> None:
    model = tiny_t5(**T5_1_0).eval()
    tokens, padding, answers = tiny_rows()
    memory = model.encode(tokens, padding)
    assert memory.shape == (9, 2, 16)
    assert torch.equal(model.decode(memory, padding, answers), model(tokens, padding, answers))


def test_tables_are_tied_where_flags_tie_them_and_a_bias_is_one_of_linear_layers() -> None:
    names = {name for name, _ in tiny_t5().named_parameters()}
    assert {"embedding.position.weight", "output_bias.bias"} <= names
    assert not any(name.startswith("output.") for name in names)
    old, new = ({n for n, _ in tiny_t5(**flags).named_parameters()} for flags in (T5_1_0, T5_1_1))
    assert new - old == {"output.weight"}
    assert not any("bias" in name for name in old)
    assert {"encoder.relative_positions.weight", "decoder.relative_positions.weight"} <= old
    assert len([n for n in old if n.endswith("cross_attention.key_value.weight")]) == 3


def test_the_loss_is_that_of_counted_labels() -> None:
    model = tiny_t5(**T5_1_1)
    tokens, padding, answers = tiny_rows()
    labels = answers.clone()
    labels[1, 3:] = -1
    loss = model(tokens, padding, answers, labels)
    assert isinstance(loss, LossSum)
    scores = model(tokens, padding, answers).transpose(0, 1)[..., : TINY_VOCAB.true]
    expected = torch.nn.functional.cross_entropy(
        scores.flatten(0, 1), labels.flatten(), ignore_index=-1
    )
    assert loss.count == 10
    torch.testing.assert_close(loss.mean, expected, **SAME)


@pytest.mark.parametrize("flags", [T5_1_0, T5_1_1, {}], ids=["1.0", "1.1", "megatron"])
def test_a_fused_loss_is_the_loss(flags: Mapping[str, object]) -> None:
    whole = tiny_t5(**flags)
    tokens, padding, answers = tiny_rows()
    expected = whole(tokens, padding, answers, answers)
    build = dataclasses.replace(whole.build, fuse_loss=True)
    stage = PipelineStage(t5_layers(whole.config, build, TINY_DECODER))
    stage.load_state_dict(whole.state_dict())
    carry = stage(t5_carry(tokens, padding, answers))
    # The bias of Megatron's head is added to logits.
    assert len(carry) == (1 if whole.config.add_bias_linear else 2)
    found = t5_loss(build, carry, answers)
    torch.testing.assert_close(found.total, expected.total, **SAME)


@pytest.mark.parametrize(
    "policy",
    [
        ActivationPolicy(method=RecomputeMethod.UNIFORM, num_layers=2),
        ActivationPolicy(modules=frozenset(RecomputeModule)),
    ],
)
def test_recomputed_activations_give_the_same_gradients(policy: ActivationPolicy) -> None:
    flags = {**T5_1_0, "hidden_dropout": 0.2, "attention_dropout": 0.2}
    gradients = []
    for activations in (ActivationPolicy(), policy):
        model = tiny_t5(tiny_build(activations=activations), **flags)
        tokens, padding, answers = tiny_rows()
        model(tokens, padding, answers, answers).total.backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*gradients))


def test_no_two_places_of_a_t5_drop_the_same_elements() -> None:
    model = tiny_t5(hidden_dropout=0.1, attention_dropout=0.1)
    seeds = [
        int(buffer) for name, buffer in model.named_buffers() if name.endswith(("seed", "_seed"))
    ]
    # Two embeddings; attention, and two or three additions, in each of two and three layers.
    assert len(seeds) == 2 + 2 * 3 + 3 * 5
    assert len(set(seeds)) == len(seeds)


def test_a_decoder_may_be_as_deep_as_its_encoder() -> None:
    model = T5Model(tiny_config(), tiny_build(), EncoderDecoderConfig(decoder_num_layers=0))
    assert sum(spec.block for spec in model.specs) == 4


def test_a_t5_has_a_decoder() -> None:
    with pytest.raises(ConfigError, match="an encoder and a decoder has no decoder"):
        t5_layers(tiny_config(), tiny_build(), EncoderDecoderConfig())


def test_a_cut_behind_the_encoder_stands_behind_its_norm() -> None:
    specs = t5_layers(tiny_config(**T5_1_0), tiny_build(), TINY_DECODER)
    last = [specs[end - 1].name for end in ends_of_blocks(specs)]
    assert last == [
        "encoder.layers.0",
        "encoder.final_norm",
        *(f"decoder.layers.{i}" for i in range(3)),
    ]


def over_ranks() -> ModelBuild:
    alone = ParallelContext.single()
    group = dataclasses.replace(alone.cp, ranks=(0, 1))
    return tiny_build(dataclasses.replace(alone, topology=Topology(cp=2), cp=group))


@pytest.mark.parametrize(
    ("changes", "build", "flag"),
    [
        ({"num_experts": 2}, tiny_build(), "--num-experts 2"),
        ({"use_parallel_residual": True}, tiny_build(), "--use-parallel-residual"),
        ({"softmax_type": SoftmaxType.OFF_BY_ONE}, tiny_build(), "--softmax-type off-by-one"),
        (
            {"no_rope_freq": "2", "position_embedding_type": PositionEmbedding.ROPE},
            tiny_build(),
            "--no-rope-freq 2",
        ),
        (
            {"window_attn_skip_freq": "2", "sliding_window": 4},
            tiny_build(),
            "--window-attn-skip-freq 2",
        ),
        ({}, over_ranks(), "--context-parallel-size 2"),
        (
            T5_1_0,
            tiny_build(activations=ActivationPolicy(distribute=True)),
            "--distribute-saved-activations with",
        ),
    ],
)
def test_settings_that_it_does_not_have_are_refused(
    changes: Mapping[str, object], build: ModelBuild, flag: str
) -> None:
    with pytest.raises(ConfigError, match="was given a setting that it does not have") as error:
        t5_layers(tiny_config(**changes), build, TINY_DECODER)
    assert flag in str(error.value)
