"""A stage builds each name once, under its global name, and calls the methods of the list."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from megatron.model.specs import Carry, LayerSpec
from megatron.model.stage import PipelineStage, parameters_of_layers
from megatron.mpu.stage_plan import LayerRange


class Scale(nn.Module):
    def __init__(self, by: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(by))

    def forward(self, carry: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (carry[0] * self.weight, *carry[1:])

    def undo(self, carry: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (carry[0] / self.weight, *carry[1:])


SPECS = (
    LayerSpec("outer", lambda: Scale(3.0), tied="outer"),
    LayerSpec("layers.0.deep", lambda: Scale(5.0)),
    LayerSpec("layers.1.deep", lambda: Scale(7.0)),
    LayerSpec("outer", lambda: Scale(3.0), tied="outer", call="undo"),
)


def test_layers_run_in_order_and_a_name_that_returns_is_the_same_module() -> None:
    stage = PipelineStage(SPECS)
    assert [name for name, _ in stage.named_parameters()] == [
        "outer.weight",
        "layers.0.deep.weight",
        "layers.1.deep.weight",
    ]
    (out,) = stage((torch.ones(()),))
    assert out.item() == 35.0


def test_a_layer_that_an_earlier_one_contains_is_not_built_again() -> None:
    built: list[str] = []

    def build(name: str) -> nn.Module:
        built.append(name)
        module = Scale(2.0)
        if name == "whole":
            module.add_module("part", Scale(4.0))
        return module

    specs = [
        LayerSpec("whole", lambda: build("whole")),
        LayerSpec("whole.part", lambda: build("part"), call="undo"),
    ]
    (out,) = PipelineStage(specs)((torch.ones(()),))
    assert built == ["whole"]
    assert out.item() == 0.5
    assert list(PipelineStage(specs, [LayerRange(1, 2)]).state_dict()) == ["whole.part.weight"]
    assert built == ["whole", "part"]


def test_names_do_not_depend_on_where_a_stage_begins() -> None:
    stage = PipelineStage(SPECS, [LayerRange(2, 4)])
    assert list(stage.state_dict()) == ["layers.1.deep.weight", "outer.weight"]
    assert list(stage.tied_parameters()) == ["outer.weight"]
    assert PipelineStage(SPECS, [LayerRange(1, 3)]).tied_parameters() == {}


def test_hooks_on_a_layer_run() -> None:
    stage, seen = PipelineStage(SPECS), []
    stage.get_submodule("layers.1.deep").register_forward_hook(lambda *_: seen.append(1))
    stage((torch.ones(()),))
    assert seen == [1]


def test_parameters_of_layers_are_counted_without_being_made() -> None:
    devices = []

    def layer() -> nn.Module:
        made = nn.Linear(3, 2)
        devices.append(made.weight.device.type)
        return made

    specs = [LayerSpec("a", layer), LayerSpec("b", nn.Identity), LayerSpec("a", layer)]
    assert parameters_of_layers(specs) == (8, 0, 8)  # a layer that shares them has their work
    assert devices == ["meta", "meta"]


def test_a_layer_is_called_as_its_place_in_the_list_says() -> None:
    def first_alone(layer: Callable[[Carry], Carry], carry: Carry) -> Carry:
        return (*layer(carry[:1]), *carry[1:])

    def reversed_carry(layer: Callable[[Carry], Carry], carry: Carry) -> Carry:
        return layer(carry[::-1])

    specs = [
        LayerSpec("scale", lambda: Scale(3.0), around=first_alone),
        LayerSpec("scale", lambda: Scale(3.0), around=reversed_carry),
    ]
    one, other = PipelineStage(specs)((torch.tensor(1.0), torch.tensor(2.0)))
    assert (one.item(), other.item()) == (6.0, 3.0)
