"""The whole model in one module, as the native stage of the whole list has it."""

import torch
from torch import nn

from megatron.engine.deepspeed.model import (
    DeepSpeedModel,
    _zero_padding,
    weights_saved_by_reference,
)
from megatron.model.init import initialize_parameters
from megatron.model.losses import LossSum
from megatron.model.stage import PipelineStage
from megatron.model_build import model_build
from pretrain_gpt import gpt_task
from tests.support.tiny import MODELS, tiny_run
from tests.unit.engine.engines import runtime_of, tiny_batches, tiny_engine


def test_names_values_and_losses_are_those_of_a_native_stage() -> None:
    runtime = runtime_of(tiny_run("nowhere", **MODELS["bloom"]))
    config, task, build = runtime.config, gpt_task(), model_build(runtime)
    specs = task.layers(config.model, build)
    shared: list[nn.Module] = []
    model = DeepSpeedModel(specs, task, build, seed=config.training.seed, share=shared.append)
    stage = PipelineStage(specs)
    initialize_parameters(stage, seed=config.training.seed, ctx=build.ctx)
    own, native = dict(model.named_parameters()), dict(stage.named_parameters())
    assert list(own) == list(native)
    assert all(torch.equal(own[name], native[name]) for name in native)
    once = [parameter for layer in shared for parameter in layer.parameters()]
    assert len(once) == len(set(once)) == len(own), "each layer is shared out once"
    inputs, labels = tiny_engine()._microbatch(tiny_batches(1)[0])
    total, count = model(inputs, labels)
    expected = task.loss(stage(inputs), labels, build)
    assert torch.equal(total, expected.total)
    assert torch.equal(count, expected.count)
    with model.measured_by(lambda carry, labels: LossSum(carry[0][0, 0, :2], labels[0][0, :2])):
        scores, tokens = model(inputs, labels)
    assert (scores.shape, tokens.tolist()) == ((2,), labels[0][0, :2].tolist())
    assert torch.equal(model(inputs, labels)[0], total), "the loss is back"


def test_a_tied_weight_is_used_without_calling_its_layer() -> None:
    for tied in (True, False):
        flags = {"untie_embeddings_and_output_weights": not tied}
        runtime = runtime_of(tiny_run("nowhere", **flags))
        build = model_build(runtime)
        specs = gpt_task().layers(runtime.config.model, build)
        model = DeepSpeedModel(specs, gpt_task(), build, seed=1)
        used = set(model.used_elsewhere())
        names = {name for name, parameter in model.named_parameters() if parameter in used}
        assert ("embedding.word.weight" in names) == tied
        assert "layers.0.mlp.fc1.weight" not in names


class _Shared:
    """Five elements over two ranks, in parts of three."""

    def __init__(self, rank: int) -> None:
        self.ds_numel, self.ds_zero_partition_rank = 5, rank
        self.ds_tensor = torch.full((3,), torch.nan)

    def partition_numel(self) -> int:
        return 3


def test_what_rounds_a_part_up_is_zero() -> None:
    first, last = _Shared(0), _Shared(1)
    for parameter in (first, last):
        _zero_padding(parameter)
    assert first.ds_tensor.isnan().tolist() == [True, True, True]
    assert last.ds_tensor.isnan().tolist() == [True, True, False]


def test_linear_is_torchs_own_again_afterwards() -> None:
    before = torch.nn.functional.linear
    for stage in (0, 1, 2):
        with weights_saved_by_reference(stage):
            assert torch.nn.functional.linear is before
    assert torch.nn.functional.linear is before
