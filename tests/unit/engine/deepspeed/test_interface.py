"""DeepSpeed implements the protocols, with the same names of parameters."""

import ast
import inspect
import textwrap
from functools import cache

import pytest
import torch

from megatron.engine.deepspeed.interface import (
    CheckpointWriter,
    DeepSpeedRuntime,
    Monitor,
    PartitionedParameter,
    PipelineRuntime,
    partitioned,
)
from megatron.engine.deepspeed.start import import_deepspeed


def methods(protocol: type) -> dict[str, inspect.Signature]:
    return {
        name: inspect.signature(member)
        for name, member in vars(protocol).items()
        if inspect.isfunction(member) and (name == "__call__" or not name.startswith("_"))
    }


def class_of(protocol: type) -> type:
    import_deepspeed()
    from deepspeed.monitor.monitor import MonitorMaster
    from deepspeed.runtime.checkpoint_engine import TorchCheckpointEngine
    from deepspeed.runtime.engine import DeepSpeedEngine

    from megatron.engine.deepspeed.pipe_engine import PatchedPipelineEngine

    return {
        Monitor: MonitorMaster,
        CheckpointWriter: TorchCheckpointEngine,
        DeepSpeedRuntime: DeepSpeedEngine,
        PipelineRuntime: PatchedPipelineEngine,
    }[protocol]


@cache
def source_of(owner: type) -> ast.ClassDef:
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(owner))).body
    assert isinstance(tree, ast.ClassDef)
    return tree


def parameters(owner: type, name: str) -> set[str]:
    """Read them from the source: some of DeepSpeed's decorators hide the signature."""
    (base, *_) = (base for base in owner.__mro__ if name in vars(base))
    (method,) = (
        node
        for node in source_of(base).body
        if isinstance(node, ast.FunctionDef) and node.name == name
    )
    return {argument.arg for argument in (*method.args.args, *method.args.kwonlyargs)}


@pytest.mark.parametrize(
    ("protocol", "number"),
    [(Monitor, 1), (CheckpointWriter, 1), (DeepSpeedRuntime, 12), (PipelineRuntime, 2)],
)
def test_deepspeed_has_the_methods_with_these_parameters(protocol: type, number: int) -> None:
    expected = methods(protocol)
    assert len(expected) == number
    for name, ours in expected.items():
        if name == "__call__":
            assert issubclass(class_of(protocol), torch.nn.Module)
            continue
        assert set(ours.parameters) <= parameters(class_of(protocol), name), name


def test_deepspeed_gives_its_partitioned_parameters_these_attributes() -> None:
    import_deepspeed()
    from deepspeed.runtime.zero import partition_parameters

    source = inspect.getsource(partition_parameters)
    names = [*inspect.get_annotations(PartitionedParameter), "partition_numel"]
    assert len(names) == 5
    for name in names:
        assert f"param.{name} = " in source, name


def test_a_partitioned_parameter_is_the_parameter() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    assert partitioned(parameter) is parameter
