"""Compiles transformer layers by torch.compile (`--compile`), and proves that they ran compiled.

One graph serves all layers of a kind, so that compiling takes as long for 100 layers as for one. A
layer is one graph without a break, or an error: nothing falls back to eager code unless it is said.
"""

from collections.abc import Callable
from functools import cache
from hashlib import blake2b
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from megatron import log
from megatron.errors import MachineError, first_line
from megatron.ops import library

# Other sequence lengths, as of a curriculum, are compiled anew; torch itself ends a run above 8.
MAX_SHAPES = 4


class LayerCompiler:
    """Runs layers as compiled graphs, and counts both the calls and the graphs that ran."""

    def __init__(self) -> None:
        self._functions: dict[Callable[..., Tensor], Callable[..., Tensor]] = {}
        self._shapes: set[tuple[torch.Size, torch.dtype]] = set()
        self._calls = self._runs = self._graphs = 0
        self._seconds = 0.0

    def takes(self, hidden: Tensor) -> bool:
        """Return whether a layer is to be run compiled on `hidden`, for a training pass.

        Evaluation and generation have other shapes, and gain less; they run eager.
        """
        if not torch.is_grad_enabled():
            return False
        if not hidden.requires_grad:  # its graph would have no backward pass to add gradients in
            log.warning_once(
                "compiled constants",
                "--compile: a layer whose input needs no gradient runs without being compiled",
            )
            return False
        kind = (hidden.shape, hidden.dtype)
        if kind in self._shapes:
            return True
        if len(self._shapes) == MAX_SHAPES:
            log.warning_once(
                f"compiled shapes {kind}",
                f"--compile: layers are compiled for {MAX_SHAPES} shapes already; those of hidden "
                f"states {tuple(hidden.shape)} run without being compiled",
            )
            return False
        if self._shapes:
            log.info(f"--compile: compiling layers for hidden states {tuple(hidden.shape)} too")
        self._shapes.add(kind)
        return True

    def run(self, function: Callable[..., Tensor], *inputs: object) -> Tensor:
        """Return `function(*inputs)`, computed by its graph.

        Raises:
            MachineError: it cannot be compiled to one graph.
        """
        if function not in self._functions:
            self._functions[function] = torch.compile(
                function, backend=self._compile, fullgraph=True, dynamic=False
            )
        self._calls += 1
        before, start = self._graphs, perf_counter()
        try:
            return self._functions[function](*inputs)
        except torch._dynamo.exc.TorchDynamoException as error:
            raise MachineError(
                "--compile was asked for, and a transformer layer cannot be compiled",
                found=f"{type(error).__name__}: {first_line(error)}",
                fix="leave --compile out",
            ) from error
        finally:
            if self._graphs > before:
                self._seconds += perf_counter() - start

    def check(self) -> None:
        """Check after the first step that all layers ran as graphs, and log what they took.

        Raises:
            MachineError: a layer ran otherwise.
        """
        if not 0 < self._calls == self._runs:
            raise MachineError(
                "--compile was asked for, and not every transformer layer ran as a compiled graph",
                found=f"{self._runs} of {self._calls} passes of layers in the first step",
                fix="unset TORCH_COMPILE_DISABLE and TORCHDYNAMO_DISABLE, or leave --compile out",
            )
        log.info(
            f"--compile: {self._graphs} graph{'s' * (self._graphs != 1)} by inductor, without "
            f"breaks, ran {self._runs} passes of layers; compiling took {self._seconds:.1f} s of "
            "the first step, and that of the backward pass beside it"
        )

    def _compile(self, graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        self._graphs += 1
        # torch keeps graphs on disk, by a key that does not depend on what our operators promise.
        torch.compiler.config.cache_key_tag = _operators_digest()
        backend = torch._dynamo.lookup_backend("inductor")
        compiled: Callable[..., Any] = backend(graph, inputs)

        def counted(*arguments: Any) -> Any:
            self._runs += 1
            return compiled(*arguments)

        return counted


@cache
def _operators_digest() -> str:
    digest = blake2b(digest_size=8)
    for module in sorted(Path(library.__file__).parent.glob("*.py")):
        digest.update(module.read_bytes())
    return digest.hexdigest()
