"""Tests of megatron.optimizer.sharded_parameters in one process, where a share is everything."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from megatron.mpu.context import ParallelContext
from megatron.mpu.partition import set_sharding_unit
from megatron.mpu.random import RandomStreams
from megatron.mpu.recompute import recompute
from megatron.optimizer.data_parallel import DistributedDataParallel
from megatron.optimizer.sharded_parameters import ShardedParameters

SINGLE = ParallelContext.single()
LAYERS = 4


class Chain:
    """Some layers that run one after the other, each with its parameters whole meanwhile."""

    def __init__(self, **options: bool) -> None:
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(3, 3).double() for _ in range(LAYERS))
        self.plain = [[p.detach().clone() for p in layer.parameters()] for layer in self.layers]
        self.weights = ShardedParameters(SINGLE.replicas, **{"prefetch": False, **options})
        for at, layer in enumerate(self.layers):
            for parameter in layer.parameters():
                set_sharding_unit(parameter, str(at))
            self.weights.add(layer.parameters())
        self.ddp = DistributedDataParallel(self.layers, SINGLE.replicas, sharding=self.weights)
        self.seen: list[list[bool]] = []

    def taken(self) -> list[bool]:
        """Which layers have memory."""
        return [bool(layer.weight.untyped_storage().nbytes()) for layer in self.layers]  # type: ignore[union-attr]

    def run(self, at: int, hidden: Tensor) -> Tensor:
        def layer(carry: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            self.seen.append(self.taken())
            output: Tensor = self.layers[at](*carry).tanh()
            if output.requires_grad:
                output.register_hook(lambda _: self.seen.append(self.taken()))  # type: ignore[no-untyped-call]
            return (output,)

        last = at == LAYERS - 1
        return self.weights.run(at, self.layers[at], layer, (hidden,), is_last=last)[0]

    def forward(self, run: Callable[[int, Tensor], Tensor] | None = None) -> Tensor:
        hidden = torch.ones(2, 3, dtype=torch.float64)
        for at in range(LAYERS):
            hidden = (run or self.run)(at, hidden)
        return hidden.sum()

    def gradients(self, run: Callable[[int, Tensor], Tensor] | None = None) -> list[Tensor]:
        self.ddp.start_step(1)
        self.forward(run).backward()
        self.ddp.finish()
        return [vars(parameter)["main_grad"].clone() for parameter in self.layers.parameters()]


def expected_gradients() -> list[Tensor]:
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Linear(3, 3).double() for _ in range(LAYERS))
    hidden = torch.ones(2, 3, dtype=torch.float64)
    for layer in layers:
        hidden = layer(hidden).tanh()
    hidden.sum().backward()
    return [p.grad.view(-1) for p in layers.parameters() if p.grad is not None]


def only(*here: int) -> list[bool]:
    return [at in here for at in range(LAYERS)]


def test_a_layer_is_whole_while_it_runs_and_while_its_gradients_are_computed() -> None:
    chain = Chain()
    assert chain.taken() == only()
    found = chain.gradients()
    forward, backward = chain.seen[:LAYERS], chain.seen[LAYERS:]
    assert forward == [only(at) for at in range(LAYERS)]
    # Seen when the gradient of an output has been made, before our own hook has gathered.
    assert backward == [only(3), only(), only(), only()]
    assert chain.taken() == only()
    assert all(map(torch.equal, found, expected_gradients()))


def test_the_next_layer_is_gathered_meanwhile_if_that_is_asked_for() -> None:
    chain = Chain(prefetch=True)
    chain.gradients()
    chain.seen.clear()
    found = chain.gradients()  # which layer is the next is known from the first pass
    forward, backward = chain.seen[:LAYERS], chain.seen[LAYERS:]
    assert forward == [only(0, 1), only(1, 2), only(2, 3), only(3)]
    assert backward == [only(3), only(2), only(1), only(0)]
    assert chain.taken() == only()
    assert all(map(torch.equal, found, expected_gradients()))


def test_layers_stay_for_their_backward_pass_if_that_is_asked_for() -> None:
    chain = Chain(reshard_after_forward=False)
    found = chain.gradients()
    assert chain.seen[LAYERS - 1] == only(0, 1, 2, 3)
    assert chain.seen[LAYERS:] == [only(*range(at + 1)) for at in reversed(range(LAYERS))]
    assert all(map(torch.equal, found, expected_gradients()))
    with torch.no_grad():
        chain.forward()
    assert chain.taken() == only(3), "an evaluation has no backward pass"


def test_recomputed_layers_are_gathered_again() -> None:
    streams = RandomStreams(0)
    chain = Chain(prefetch=True)

    def alone(at: int, hidden: Tensor) -> Tensor:
        return recompute(lambda hidden: chain.run(at, hidden), streams, hidden)

    def with_more(at: int, hidden: Tensor) -> Tensor:
        def layer(hidden: Tensor) -> tuple[Tensor, Tensor]:
            output = chain.run(at, hidden)
            return output, output.exp()  # the second run, which ends here, leaves the layer

        return recompute(layer, streams, hidden)[0]

    for recomputed in (alone, alone, with_more):
        found = chain.gradients(recomputed)
        assert all(map(torch.equal, found, expected_gradients()))
        assert chain.taken() == only()


def test_what_was_gathered_is_forgotten_when_the_shares_change() -> None:
    chain = Chain()
    with torch.no_grad():
        before = chain.forward()
        assert chain.taken() == only(3)
        for parameter in chain.layers.parameters():
            chain.weights.values(parameter).zero_()
        assert torch.equal(chain.forward(), before) is False
        chain.weights.gather()
        assert chain.forward() == 0.0


def test_what_is_kept_are_the_values_in_order() -> None:
    chain = Chain()
    for layer, values in zip(chain.layers, chain.plain):
        for parameter, plain in zip(layer.parameters(), values):
            assert torch.equal(chain.weights.values(parameter), plain.view(-1))
            assert chain.weights.owned(parameter) == (0, plain.numel())
            assert torch.equal(chain.ddp.values(parameter), plain.view(-1))


def test_parameters_that_are_not_trained_stay_whole() -> None:
    layer = nn.Linear(3, 3)
    layer.bias.requires_grad_(False)
    weights = ShardedParameters(SINGLE.replicas, prefetch=False)
    weights.add(layer.parameters())
    assert layer.bias.untyped_storage().nbytes()
    assert not layer.weight.untyped_storage().nbytes()
