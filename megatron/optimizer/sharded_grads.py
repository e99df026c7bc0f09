"""Gradients of which each replica keeps its share: ZeRO stage 2.

Rajbhandari et al. 2020 (arXiv 1910.02054), section 5.2. The gradients of a unit are whole from the
first of them in a backward pass to the last; then they are summed over replicas, and a rank adds
its share of the sum to what it keeps. `main_grad` of a parameter is its elements in that share,
[owned], flat. Sums over other ranks (tied weights, sequence parallelism) are sums of shares, after
those over replicas.
"""

from collections.abc import Callable, Sequence

import torch
from torch.nn import Parameter

from megatron.mpu.collectives import start_all_reduce, start_reduce_scatter
from megatron.optimizer.grad_buffer import HALF_DTYPES, Arrivals, Flat, GradBuffer, Reduction, cut
from megatron.optimizer.releasable import ReleasableTensor
from megatron.optimizer.sharded_flats import own_elements, own_share, sharded_flats


class ShardedGradBuffer(GradBuffer):
    """As `GradBuffer`; every unit has to have its gradients in every backward pass, or in none.

    `after_unit` is called with the parameters of a unit when all of their gradients have been
    computed in a backward pass.
    """

    after_unit: Callable[[Sequence[Parameter]], object] = staticmethod(lambda parameters: None)
    _running: Reduction | None = None

    def start_step(self, num_passes: int | None = None) -> None:
        """Forget all gradients, before the first backward pass of a step."""
        super().start_step(num_passes)
        self._kept: set[int] = set()  # reductions that have added to what is kept

    def finish(self, before: Callable[[], None] | None = None) -> None:
        """Return once this rank has its share of all gradients, summed over replicas.

        Args:
            before: sums shares of held parameters over ranks outside of the group, at the end.

        Raises:
            ConfigError: a parameter has had no gradient in this step.
        """
        self._check_all_arrived()
        self._complete()
        sums = [
            start_all_reduce(flat.data, flat.across)
            for flat in self.flats
            if flat.across is not None
        ]
        for pending in sums:
            pending.wait()
        if before is not None:
            before()

    def _lay_out(
        self, gradient_dtype: torch.dtype, bucket_elements: int | None
    ) -> tuple[Flat, ...]:
        del bucket_elements  # a unit is reduced as one

        def dtype_of(parameter: Parameter) -> torch.dtype:
            return gradient_dtype if parameter.dtype in HALF_DTYPES else parameter.dtype

        flats = sharded_flats(self._names, self._replicas, dtype_of)
        for flat in flats:
            for parameter, own in zip(flat.parameters, own_elements(flat)):
                parameter.main_grad = own  # type: ignore[attr-defined]
        return flats

    def _make_room(self, reduction: Reduction) -> None:
        if reduction is self._running:
            self._complete()
        _room(reduction.flat).take()

    def _arrived(self, arrivals: Arrivals) -> None:
        """Reduce a unit when it has its last gradient of this backward pass."""
        arrivals.parameter.grad = None
        reduction = arrivals.reduction
        reduction.waits_for -= 1
        if reduction.waits_for:
            return
        self._complete()
        flat = reduction.flat
        reduction.waits_for = len(flat.parameters)
        for member in reduction.arrivals:
            member.sum.is_empty = True
        whole = _room(flat).tensor
        own = cut(whole, own_share(flat))
        reduction.pending = start_reduce_scatter(whole, flat.group, out=own)
        self._running = reduction
        if not self._overlap:
            self._complete()
        self.after_unit(flat.parameters)

    def _complete(self) -> None:
        """Wait for the sum that is under way, add this rank's share of it, and free the rest."""
        reduction, self._running = self._running, None
        if reduction is None or reduction.pending is None:
            return
        share = reduction.pending.wait()
        if id(reduction) in self._kept:
            reduction.flat.data.add_(share)
        else:
            reduction.flat.data.copy_(share)
            self._kept.add(id(reduction))
        reduction.pending = None
        _room(reduction.flat).release()


def _room(flat: Flat) -> ReleasableTensor:
    assert flat.room is not None  # noqa: S101  # invariant: `sharded_flats` makes one
    return flat.room
