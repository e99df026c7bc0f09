"""What is measured: the training step of our engine on random tokens, and a device's matmul peak.

The engine is built exactly as `pretrain_gpt.py` builds it; only the data is made in memory, so
that neither disks nor loader processes take part.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron import device
from megatron.arguments import parse_args
from megatron.config.run import RunConfig
from megatron.engine.base import StepPlan, StepReport
from megatron.engine.build import build_engine
from megatron.engine.native import NativeEngine
from megatron.global_vars import Runtime
from megatron.initialize import initialize_megatron, shutdown_megatron
from megatron.model.accounting import MemoryEstimate, RankShare, flops_per_token, memory_bytes
from megatron.model.specs import ModelBuild
from megatron.model_build import model_build
from megatron.mpu.context import ParallelContext
from megatron.mpu.topology import Topology
from megatron.preflight.checks import MODEL_CHECKS
from megatron.timers import Timers
from pretrain_gpt import gpt_task


@dataclass(frozen=True)
class Workload:
    """An engine ready to train, with its configuration."""

    flags: tuple[str, ...]
    runtime: Runtime
    build: ModelBuild
    engine: NativeEngine

    @property
    def config(self) -> RunConfig:
        """Return what the flags mean."""
        return self.runtime.config

    @property
    def flops_per_token(self) -> int:
        """Return model FLOPs of one token, forward and backward, by `FLOPS_CONVENTION`."""
        flops = flops_per_token(
            self.config.model, self.build.vocab.padded, self.config.data.seq_length
        )
        return flops.model

    @property
    def memory(self) -> MemoryEstimate:
        """Return the estimated bytes of a rank of its own that trains this."""
        training, build = self.config.training, self.build
        share = RankShare(
            micro_batch_size=training.micro_batch_size,
            seq_length=self.config.data.seq_length,
            policy=training.activations,
            fuse_loss=build.fuse_loss,
            fuse_accumulation=training.gradient_accumulation_fusion,
            fuse_gated_units=build.fuse_gated_units,
            fuse_rope=build.fuse_rope,
            fuse_dropout=build.fuse_dropout,
            device_type=device.current().type,
            one_pass=True,
        )
        return memory_bytes(self.config.model, build.vocab, self.config.precision, share)

    @property
    def tokens_per_step(self) -> int:
        """Number of tokens of one micro-batch, which is also one step."""
        return self.config.training.micro_batch_size * self.config.data.seq_length

    def step(self, text: Tensor) -> StepReport:
        """Do one optimizer step on [b, s + 1] tokens, at the run's peak learning rate.

        They are of this replica, in micro-batches of the run's size.
        """
        parts = torch.split(text, self.config.training.micro_batch_size)
        plan = StepPlan(
            num_microbatches=len(parts),
            global_batch_size=text.shape[0] * self.build.ctx.dp.size,
            learning_rate=self.config.schedule.lr,
            weight_decay=self.config.optimizer.weight_decay,
            seq_length=text.shape[1] - 1,
            first_sample=0,
        )
        return self.engine.train_step(iter([{"text": part} for part in parts]), plan)

    def tokens(self, seed: int) -> Tensor:
        """Return random token ids [b, s + 1] on the CPU, where a data loader puts them."""
        size = (self.config.training.micro_batch_size, self.config.data.seq_length + 1)
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(0, self.build.vocab.true, size, generator=generator)

    def beside(self, *flags: str) -> "Workload":
        """Return a second engine in the same processes, with more flags."""
        config, context = parse_args([*self.flags, *flags]), self.runtime.context
        topology = Topology.of(config.parallel, context.world.size)
        if topology != context.topology:
            context = ParallelContext.build(topology)
        return _ready(self.flags, replace(self.runtime, config=config, context=context))


@contextmanager
def workload(flags: Sequence[str], *, vocab_size: int) -> Iterator[Workload]:
    """Initialise this process for a run of `flags` on `vocab_size` tokens; undone at the end."""
    given = (
        *flags,
        *("--tokenizer-type", "NullTokenizer", "--vocab-size", str(vocab_size - 1)),
        *("--data-path", "made-in-memory"),
        *("--train-iters", "1000000"),  # the loop is the benchmark's own
    )
    config = parse_args(given)
    runtime = initialize_megatron(config, checks=MODEL_CHECKS)
    try:
        yield _ready(given, runtime)
    finally:
        shutdown_megatron()


def _ready(flags: tuple[str, ...], runtime: Runtime) -> Workload:
    build = model_build(runtime)
    engine = build_engine(runtime.config, gpt_task(), build, runtime.tokenizer, Timers())
    assert isinstance(engine, NativeEngine)  # noqa: S101  # invariant: only one kind
    return Workload(flags, runtime, build, engine)


def matmul_peak_tflops(dtype: torch.dtype, sizes: Sequence[int], *, repeats: int = 5) -> float:
    """Return the fastest rate of a square matrix product on the device, in TFLOP/s."""
    best = 0.0
    for size in sizes:
        left, right = (torch.randn(size, size, device=device.current()).to(dtype) for _ in range(2))
        left @ right
        for _ in range(repeats):
            device.synchronize()
            started = time.perf_counter()
            left @ right
            device.synchronize()
            best = max(best, 2 * size**3 / (time.perf_counter() - started) / 1e12)
    return best
