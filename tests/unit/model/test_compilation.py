"""A layer runs as one graph, or the run ends; what runs otherwise is counted and said."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.errors import MachineError
from megatron.model import compilation
from megatron.model.compilation import MAX_SHAPES, LayerCompiler


@pytest.fixture(autouse=True)
def without_inductor(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run graphs as they were traced; inductor would take seconds for each."""
    monkeypatch.setattr(torch._dynamo, "lookup_backend", lambda _: lambda graph, inputs: graph)
    yield
    torch.compiler.reset()


def double(hidden: Tensor) -> Tensor:
    return hidden + hidden


def in_two_graphs(hidden: Tensor) -> Tensor:
    torch._dynamo.graph_break()
    return hidden + hidden


def states(*shape: int) -> Tensor:
    return torch.ones(shape, requires_grad=True)


def test_one_graph_serves_every_call(capsys: pytest.CaptureFixture[str]) -> None:
    compiler, hidden = LayerCompiler(), states(3)
    for _ in range(2):
        assert torch.equal(compiler.run(double, hidden), 2 * hidden)
    compiler.check()
    line = "--compile: 1 graph by inductor, without breaks, ran 2 passes"
    assert line in capsys.readouterr().out


def test_code_that_is_more_than_one_graph_ends_the_run() -> None:
    with pytest.raises(MachineError, match=r"(?s)cannot be compiled.*found: .*fix: leave"):
        LayerCompiler().run(in_two_graphs, states(3))


def uncompiled(function: Callable[..., Tensor], **_: Any) -> Callable[..., Tensor]:
    return function


def test_a_layer_that_did_not_run_as_a_graph_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch.compile does where TORCH_COMPILE_DISABLE is set."""
    monkeypatch.setattr(torch, "compile", uncompiled)
    compiler = LayerCompiler()
    compiler.run(double, states(3))
    with pytest.raises(MachineError, match=r"(?s)not every.*0 of 1 passes.*TORCH_COMPILE_DISABLE"):
        compiler.check()


def test_a_step_without_layers_is_no_proof() -> None:
    with pytest.raises(MachineError, match="0 of 0 passes"):
        LayerCompiler().check()


def test_evaluation_and_more_shapes_than_the_limit_run_eager(
    capsys: pytest.CaptureFixture[str],
) -> None:
    compiler = LayerCompiler()
    with torch.no_grad():
        assert not compiler.takes(states(1))
    assert capsys.readouterr().err == ""
    assert not compiler.takes(torch.ones(1))
    assert "needs no gradient runs without being compiled" in capsys.readouterr().err
    for length in range(1, MAX_SHAPES + 1):
        assert compiler.takes(states(length))
    assert "compiling layers for hidden states (2,) too" in capsys.readouterr().out
    assert not compiler.takes(states(MAX_SHAPES + 1))
    warning = f"compiled for {MAX_SHAPES} shapes already; those of hidden states (5,)"
    assert warning in capsys.readouterr().err
    assert compiler.takes(states(1))


def test_graphs_on_disk_are_those_of_these_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.compiler.config, "cache_key_tag", "")
    LayerCompiler().run(double, states(3))
    assert torch.compiler.config.cache_key_tag == compilation._operators_digest()
