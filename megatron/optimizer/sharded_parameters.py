"""Parameters of which each replica keeps its share, whole while their layer runs: ZeRO stage 3.

Rajbhandari et al. 2020 (arXiv 1910.02054), section 5.3. A unit is gathered before its layer's
forward pass and given back after it, gathered again when the gradient of the layer's output is
there, and given back when all of its gradients are. Parameters stay the same objects, as views of
memory that comes and goes, so that everything else sees the module that it would see without this.
What a reader would get wrong: between those times the values of a parameter must not be read;
`values` are what this rank keeps.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from megatron.mpu.collectives import Pending, start_all_gather
from megatron.mpu.context import ReplicaGroups
from megatron.optimizer.buckets import ElementRange
from megatron.optimizer.grad_buffer import Flat, cut
from megatron.optimizer.releasable import ReleasableTensor
from megatron.optimizer.sharded_flats import own_elements, own_ranges, own_share, sharded_flats

Tensors = tuple[Tensor, ...]


class _Unit:
    """A buffer of parameters, and whether all of it is here."""

    def __init__(self, flat: Flat, room: ReleasableTensor) -> None:
        self.flat, self._room = flat, room
        self._pending: Pending | None = None
        self.in_backward = False  # its gradients are being computed

    def start(self) -> None:
        """Begin to gather it if it is not here."""
        if not self._room.is_taken:
            self._room.take()
            self._pending = start_all_gather(self.flat.data, self.flat.group, out=self._room.tensor)

    def wait(self) -> None:
        """Return once it may be read; `start` was called."""
        if self._pending is not None:
            self._pending.wait()
            self._pending = None

    def release(self) -> None:
        """Give its memory back."""
        self.wait()
        self.in_backward = False
        self._room.release()


class ShardedParameters:
    """The trained parameters of a stage, shared out over replicas unit by unit.

    Args:
        prefetch: gather the parameters of the layer that comes next while one runs.
        reshard_after_forward: give those of a layer back between its forward and backward pass.
    """

    def __init__(
        self, replicas: ReplicaGroups, *, prefetch: bool, reshard_after_forward: bool = True
    ) -> None:
        self._replicas, self._prefetch = replicas, prefetch
        self._reshard = reshard_after_forward
        self._units: list[_Unit] = []
        self._unit_of: dict[Parameter, _Unit] = {}
        self._owned: dict[Parameter, ElementRange] = {}
        self._values: dict[Parameter, Tensor] = {}
        self._of_layer: dict[int, tuple[_Unit, ...]] = {}

    def add(self, parameters: Iterable[Parameter]) -> None:
        """Keep this rank's share of the parameters of a module, and give the rest back."""
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        for flat in sharded_flats(trained, self._replicas, lambda parameter: parameter.dtype):
            room = flat.room
            assert room is not None  # noqa: S101  # invariant: `sharded_flats` makes one
            views = flat.views(room)
            room.take()
            for parameter, view in zip(flat.parameters, views):
                view.copy_(parameter.detach())
                parameter.data = view
            flat.data.copy_(cut(room.tensor, own_share(flat)))
            room.release()
            unit = _Unit(flat, room)
            self._units.append(unit)
            self._unit_of |= dict.fromkeys(flat.parameters, unit)
            self._owned |= zip(flat.parameters, own_ranges(flat))
            self._values |= zip(flat.parameters, own_elements(flat))

    def owned(self, parameter: Parameter) -> ElementRange:
        """Return the flattened elements of `parameter` that this rank keeps; may be none.

        All of them where it is not trained.
        """
        return self._owned.get(parameter, ElementRange(0, parameter.numel()))

    def values(self, parameter: Parameter) -> Tensor:
        """Return those elements: [owned], the kept ones themselves."""
        kept = self._values.get(parameter)
        return parameter.detach().view(-1) if kept is None else kept

    def run(
        self,
        at: int,
        module: nn.Module,
        layer: Callable[[Tensors], Tensors],
        carry: Tensors,
        *,
        is_last: bool,
    ) -> Tensors:
        """Run a layer with the parameters of `module`, which this makes whole meanwhile.

        Args:
            at: the layer's place in the whole model, which no other layer has.
            is_last: its parameters stay whole, for a loss that is computed with them.
        """
        if at not in self._of_layer:
            found = {self._unit_of[p]: None for p in module.parameters() if p in self._unit_of}
            self._of_layer[at] = tuple(found)
        units = self._of_layer[at]
        # Of layers that are recomputed together, the one whose backward pass has begun is the last.
        self._gather(units, then=None if any(unit.in_backward for unit in units) else at + 1)
        carry = layer(carry)
        for tensor in carry:
            self.before_backward(tensor, at)
        stays = is_last or (torch.is_grad_enabled() and not self._reshard)
        for unit in units:
            if not (unit.in_backward or stays):
                unit.release()
        return carry

    def before_backward(self, tensor: Tensor, at: int) -> None:
        """Make the parameters of layer `at` whole when the gradient of `tensor` has been made."""
        if tensor.grad_fn is not None:
            enter = partial(self._enter_backward, at)
            tensor.register_hook(enter)  # type: ignore[no-untyped-call]

    def after_gradients(self, parameters: Sequence[Parameter]) -> None:
        """Give the unit of `parameters` back: all of its gradients have been computed."""
        self._unit_of[parameters[0]].release()

    def gather(self) -> None:
        """Forget what was gathered: the shares have changed."""
        for unit in self._units:
            unit.release()

    def wait(self) -> None:
        """Do nothing: who needs parameters gathers them."""

    def _enter_backward(self, at: int, gradient: Tensor) -> None:
        del gradient
        units = self._of_layer[at]
        self._gather(units, then=at - 1)
        for unit in units:
            unit.in_backward = True

    def _gather(self, units: Iterable[_Unit], *, then: int | None) -> None:
        """Return once `units` are whole, with the gather of layer `then` begun."""
        for unit in units:
            unit.start()
        for unit in units:
            unit.wait()
        if self._prefetch and then is not None:
            for unit in self._of_layer.get(then, ()):
                unit.start()
