"""TrainingConfig: batches, length of samples and runs, what ends a run, evaluation, memory."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from enum import StrEnum
from itertools import pairwise
from typing import NamedTuple

from megatron.config.activations import (
    ALL_LAYERS,
    ActivationPolicy,
    RecomputeGranularity,
    RecomputeMethod,
    RecomputeModule,
    activation_problems,
)
from megatron.config.curriculum import CurriculumSchedule, curriculum_problems
from megatron.config.fields import check_field, check_loss_weight, flag, raise_all
from megatron.config.skips import skip_problems, skipped_ranges
from megatron.errors import ConfigError


class BatchStep(NamedTuple):
    """A part of the training with a global batch size of its own."""

    first_token: int
    size: int


_SUFFIXES = {"": 0, "K": 3, "M": 6, "B": 9, "T": 12}


def parse_batch_steps(text: str) -> tuple[BatchStep, ...]:
    """Return the steps of "0:768 250B:1536 ...", in order; raises ConfigError."""
    steps = []
    for word in text.split():
        found = re.fullmatch(r"(\d+(?:\.\d+)?)([KMBT]?):([1-9]\d*)", word)
        tokens = found and Decimal(found[1]).scaleb(_SUFFIXES[found[2]])
        if not found or tokens is None or tokens != int(tokens):
            raise _bad_steps(text, f"{word} is not TOKENS:SIZE")
        steps.append(BatchStep(int(tokens), int(found[3])))
    if not steps or steps[0].first_token != 0:
        raise _bad_steps(text, "it does not begin with token 0")
    for step, following in pairwise(steps):
        if following.first_token <= step.first_token:
            raise _bad_steps(text, f"{following.first_token} does not follow {step.first_token}")
    return tuple(steps)


def _bad_steps(text: str, why: str) -> ConfigError:
    return ConfigError(
        f"the schedule of batch sizes cannot be read: {why}",
        found=f'--step-batch-size-schedule "{text}"',
        fix="write sizes with the tokens from which on they hold, such as "
        '--step-batch-size-schedule "0:256 2.5B:512 100B:1024"',
    )


class NonfinitePolicy(StrEnum):
    """What happens when the loss or the gradient is not finite."""

    STOP = "stop"
    SKIP = "skip"


class SpikeAction(StrEnum):
    """What happens when the loss has spiked."""

    WARN = "warn"
    REWIND = "rewind"


class AttentionBackend(StrEnum):
    """The kernel that computes attention, as Megatron-LM names them."""

    AUTO = "auto"
    FLASH = "flash"
    FUSED = "fused"
    UNFUSED = "unfused"
    LOCAL = "local"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingConfig:
    """Batch sizes, duration, evaluation and the conditions that end a run."""

    micro_batch_size: int = flag(help="samples per forward pass of one data-parallel rank")
    global_batch_size: int | None = flag(
        None, help="samples per iteration; when not set one micro-batch per data-parallel rank"
    )
    rampup_batch_size: tuple[int, ...] | None = flag(
        None, help="START INCREMENT SAMPLES: grow the global batch linearly from START"
    )
    step_batch_size_schedule: str | None = flag(
        None,
        help='"0:SIZE TOKENS:SIZE ...": the global batch size from so many tokens on, with K, M, B '
        "or T for thousands, millions, ...",
    )
    train_iters: int | None = flag(None, help="iterations to train for")
    train_samples: int | None = flag(None, help="samples to train for")
    train_tokens: int | None = flag(
        None, help="end with the iteration that reaches this many tokens, if the run is not over"
    )
    curriculum_schedule: CurriculumSchedule | None = flag(
        None, help="train on short samples first: how their length grows, as in DeepSpeed"
    )
    curriculum_seqlen_min: int | None = flag(
        None, help="linear, root: tokens of the first training samples"
    )
    curriculum_seqlen_max: int | None = flag(
        None, help="linear, root: tokens that they grow to; --seq-length if not set"
    )
    curriculum_seqlen_step: int | None = flag(
        None, help="linear, root: lengths are multiples of this; a multiple of 8 is fast on GPUs"
    )
    curriculum_iters: int | None = flag(
        None, help="linear, root: iterations over which samples grow"
    )
    curriculum_root_degree: float | None = flag(
        None, help="root: 2 for lengths that grow with the square root of the iteration"
    )
    curriculum_seqlens: tuple[int, ...] | None = flag(
        None, help="discrete: tokens of the samples, one length after the other"
    )
    curriculum_seqlens_until: tuple[int, ...] | None = flag(
        None, help="discrete: the last iteration of each length but the last"
    )
    eval_interval: int = flag(1000, help="iterations between evaluations; 0 for only at the end")
    eval_iters: int = flag(100, help="global batches per evaluation; 0 turns evaluation off")
    eval_at_start: bool = flag(False, help="evaluate also before the first iteration")
    eval_only: bool = flag(
        False,
        help="evaluate what --load holds on the validation and the test data, and train nothing",
        aliases=("--skip-train",),
    )
    skip_train_iteration_range: tuple[str, ...] | None = flag(
        None, help="iterations whose data are passed over untrained, as 100-120 200-200"
    )
    exit_interval: int | None = flag(None, help="stop at a multiple of this many iterations")
    exit_duration_in_mins: float | None = flag(None, help="stop after this many minutes")
    exit_signal_handler: bool = flag(True, help="on SIGTERM or SIGUSR1 save a checkpoint and exit")
    kill_switch_path: str | None = flag(
        None, help="save and exit as soon as a file of this name exists"
    )
    seed: int = flag(1234, help="seed of initial values, data order and dropout")
    deterministic_mode: bool = flag(
        False,
        help="use only kernels and collectives that give the same bits from run to run; an "
        "operation that has none is an error",
    )
    bf16_reduced_precision_matmul: bool = flag(
        True,
        help="products of bfloat16 on GPUs may add partial sums in bfloat16",
        off=("--disable-bf16-reduced-precision-matmul",),
    )
    recompute_granularity: RecomputeGranularity | None = flag(
        None, help="compute layers, or parts of them, again in backward instead of keeping them"
    )
    recompute_method: RecomputeMethod | None = flag(
        None,
        help="under full: all layers in groups, or a stage's first ones; uniform if not set",
    )
    recompute_num_layers: int | None = flag(
        None,
        help="uniform: layers recomputed as one; block: layers of each virtual stage that are "
        "recomputed; 1 if not set",
        aliases=("--checkpoint-num-layers", "--activations-checkpoint-num-layers"),
    )
    recompute_modules: tuple[RecomputeModule, ...] | None = flag(
        None, help="under selective: any of core_attn mlp act layernorm; core_attn if not set"
    )
    distribute_saved_activations: bool = flag(
        False,
        help="split the saved inputs of recomputed layers over the tensor-parallel ranks",
        aliases=("--distribute-checkpointed-activations",),
    )
    cpu_offloading_num_layers: int = flag(
        0, help="first layers of each virtual stage whose activations wait in host memory"
    )
    checkpoint_in_cpu: bool = flag(
        False, help="activations of all layers wait in host memory, not of the first ones only"
    )
    cross_entropy_loss_fusion: bool = flag(
        True,
        help="compute the projection of a GPT to the vocabulary and its loss a few tokens at a "
        "time, so that the logits of a micro-batch are never in memory together",
    )
    z_loss_coeff: float = flag(
        0.0,
        help="weight of the loss log^2 Z of each counted token, Z the sum of exponentials over the "
        "vocabulary, that keeps logits near zero (arXiv 2204.02311, section 5); such as 0.0001",
    )
    attention_backend: AttentionBackend = flag(
        AttentionBackend.AUTO,
        help="kernel of attention: the fastest that fits, FlashAttention, cuDNN's, or scores and "
        "softmax one after the other (unfused, local); results differ in their last bits",
    )
    rope_fusion: bool = flag(
        True,
        help="rotate queries and keys by one operator; else by PyTorch's own operations, whose "
        "results differ in their last bits",
    )
    bias_swiglu_fusion: bool = flag(
        True,
        help="compute the gated unit of an MLP by one operator, which saves its input alone; else "
        "by PyTorch's own operations, whose results differ in their last bits",
    )
    bias_dropout_fusion: bool = flag(
        True,
        help="drop hidden states and add the residual by one operator, which saves no mask; else "
        "by PyTorch's own operations, with the same masks",
    )
    gradient_accumulation_fusion: bool = flag(
        True,
        help="let matrix products add gradients of weights to their buffer; else they make tensors "
        "that are added to it, with results that differ in their last bits",
    )
    compile: bool = flag(
        False,
        help="compile transformer layers by torch.compile (inductor) for training, as one graph "
        "for all layers; the operators of megatron/ops keep their kernels",
    )
    cuda_graph: bool = flag(
        False,
        help="capture the forward and backward passes of a step as one CUDA graph, which a GPU "
        "runs without waiting for the host to launch each kernel; no effect on a CPU",
    )
    nonfinite_policy: NonfinitePolicy = flag(
        NonfinitePolicy.STOP, help="what to do when the loss or gradient is not finite"
    )
    nonfinite_limit: int = flag(
        10, help="iterations in a row that may be skipped under --nonfinite-policy skip"
    )
    loss_spike_factor: float | None = flag(
        None,
        help="a loss above this many times the median of the last 32 finite ones is a spike; when "
        "not set nothing is one",
    )
    loss_spike_action: SpikeAction = flag(
        SpikeAction.WARN,
        help="what to do then: warn; or end with an exit code that may be started again, which "
        "passes over the iterations from the last checkpoint to the spike (rewind)",
    )
    manual_gc: bool = flag(
        False,
        help="collect Python's garbage at --manual-gc-interval and around evaluations, on all "
        "ranks after the same steps, and at no other time",
    )
    manual_gc_interval: int = flag(
        0, help="iterations between collections; 0: around evaluations alone"
    )
    manual_gc_eval: bool = flag(
        True,
        help="with --manual-gc, collect before and after an evaluation",
        off=("--disable-manual-gc-eval",),
    )
    check_agreement_interval: int = flag(
        100,
        help="iterations between comparisons of counters and samples of ranks; 0: only at saves",
    )
    rerun_check_interval: int = flag(
        0,
        help="iterations between checks that every rank computes the same bits twice, from the "
        "first micro-batch of a step; 0 for never",
    )
    num_threads: int | None = flag(None, help="CPU threads per rank; when not set, torch's choice")

    def __post_init__(self) -> None:
        raise_all(self._problems())

    @property
    def activations(self) -> ActivationPolicy:
        """What a forward pass saves for its backward pass, with defaults filled in."""
        full = self.recompute_granularity is RecomputeGranularity.FULL
        selective = self.recompute_granularity is RecomputeGranularity.SELECTIVE
        modules = self.recompute_modules or (RecomputeModule.CORE_ATTN,)
        return ActivationPolicy(
            method=(self.recompute_method or RecomputeMethod.UNIFORM) if full else None,
            num_layers=self.recompute_num_layers or 1,
            modules=frozenset(modules) if selective else frozenset(),
            distribute=self.distribute_saved_activations,
            offload_layers=ALL_LAYERS if self.checkpoint_in_cpu else self.cpu_offloading_num_layers,
        )

    @property
    def skipped(self) -> tuple[range, ...]:
        """Iterations, counted from 1, whose data are skipped."""
        return skipped_ranges(self.skip_train_iteration_range or ())

    def _problems(self) -> Iterator[ConfigError]:
        yield from skip_problems(self.skip_train_iteration_range or ())
        if self.eval_only and not self.eval_iters:
            yield ConfigError(
                "an evaluation alone was asked for, and evaluation is off",
                found="--eval-only, --eval-iters 0",
                fix="use --eval-iters 10, or as many global batches as you like",
            )
        yield from self._spike_problems()
        yield from activation_problems(self)
        yield from curriculum_problems(self)
        yield from check_loss_weight("z_loss_coeff", self.z_loss_coeff)
        for name in (
            "recompute_num_layers",
            "micro_batch_size",
            "global_batch_size",
            "train_iters",
            "train_samples",
            "train_tokens",
            "exit_interval",
            "exit_duration_in_mins",
            "num_threads",
            "nonfinite_limit",
        ):
            value = getattr(self, name)
            if value is not None:
                yield from check_field(
                    value > 0, name, value, problem="it is not positive", fix="use 1 or more"
                )
        for name in (
            "eval_interval",
            "eval_iters",
            "check_agreement_interval",
            "rerun_check_interval",
            "manual_gc_interval",
            "seed",
            "cpu_offloading_num_layers",
        ):
            value = getattr(self, name)
            yield from check_field(
                value >= 0, name, value, problem="it cannot be negative", fix="use 0 or more"
            )
        if (self.train_iters is None) == (self.train_samples is None):
            yield ConfigError(
                "the length of the training must be given exactly once",
                found="neither --train-iters nor --train-samples"
                if self.train_iters is None
                else f"--train-iters {self.train_iters} and --train-samples {self.train_samples}",
                fix="give one of the two",
            )
        if self.manual_gc_interval and not self.manual_gc:
            yield ConfigError(
                "an interval of collections was given, and Python collects by itself",
                found=f"--manual-gc-interval {self.manual_gc_interval} without --manual-gc",
                fix="add --manual-gc, or leave it out",
            )
        ramp = self.rampup_batch_size
        if ramp is not None:
            yield from self._ramp_problems(ramp)
        yield from self._step_problems()

    def _spike_problems(self) -> Iterator[ConfigError]:
        factor = self.loss_spike_factor
        if factor is not None:
            yield from check_field(
                factor > 1,
                "loss_spike_factor",
                factor,
                problem="a loss no higher than those before would be a spike",
                fix="use 3",
            )
        elif self.loss_spike_action is SpikeAction.REWIND:
            yield ConfigError(
                "nothing says which loss is a spike to go back from",
                found="--loss-spike-action rewind without --loss-spike-factor",
                fix="add --loss-spike-factor 3",
            )

    @property
    def batch_steps(self) -> tuple[BatchStep, ...]:
        """The batch sizes of --step-batch-size-schedule; empty without it."""
        text = self.step_batch_size_schedule
        return () if text is None else parse_batch_steps(text)

    def _step_problems(self) -> Iterator[ConfigError]:
        try:
            steps = self.batch_steps
        except ConfigError as error:
            yield error
            return
        if not steps:
            return
        shown = f'--step-batch-size-schedule "{self.step_batch_size_schedule}"'
        largest = max(step.size for step in steps)
        if self.global_batch_size != largest:
            yield ConfigError(
                "the global batch size is not the largest of its schedule",
                found=f"--global-batch-size {self.global_batch_size}, {shown}",
                fix=f"use --global-batch-size {largest}, or leave it out",
            )
        if self.rampup_batch_size is not None:
            yield ConfigError(
                "the batch size follows two schedules",
                found=f"--rampup-batch-size and {shown}",
                fix="keep one of the two",
            )

    def _ramp_problems(self, ramp: tuple[int, ...]) -> Iterator[ConfigError]:
        shown = "--rampup-batch-size " + " ".join(map(str, ramp))
        if len(ramp) != 3 or min(ramp) <= 0:
            yield ConfigError(
                "a batch-size ramp is three positive numbers",
                found=shown,
                fix="give START INCREMENT SAMPLES, for example --rampup-batch-size 16 8 10000",
            )
            return
        start, increment, _ = ramp
        end = self.global_batch_size
        if end is None or start >= end or (end - start) % increment:
            yield ConfigError(
                "a batch-size ramp does not arrive at the global batch size",
                found=f"{shown}, --global-batch-size {end}",
                fix="use a START below the global batch size and an INCREMENT that divides the "
                "difference",
            )
