"""The interface between the training loop and engines, and the values that cross it.

The unit of work is a whole global batch. The caller decides every number (learning rate, weight
decay, micro-batches) and an engine obeys; what comes back holds the same numbers on every rank.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from megatron.checkpoint.formats.deepspeed.save import Live
from megatron.checkpoint.sharded import ShardedTensor
from megatron.config.data import DataConfig
from megatron.config.model import ModelConfig
from megatron.data.blendable_dataset import SampleDataset
from megatron.data.kinds.program_data import ProgramData
from megatron.errors import ConfigError
from megatron.json_values import JsonObject
from megatron.model.accounting import FLOPS_CONVENTION
from megatron.model.losses import LossSum
from megatron.model.specs import Carry, LayerSpec, ModelBuild, TokenFlops
from megatron.mpu.context import Group
from megatron.mpu.random import Samples
from megatron.optimizer.param_groups import UpdateRates
from megatron.tokenizer.tokenizer import Tokenizer

RawBatch = Mapping[str, Tensor]  # what a data loader yields, on the CPU
# A function of a micro-batch's last carry and its labels: total and count, of one shape.
Measure = Callable[[Carry, Carry], LossSum]


class MicroBatch(NamedTuple):
    """One micro-batch as a model takes it: the first carry, and the targets of the loss."""

    inputs: Carry
    labels: Carry  # for GPT: (labels [b, s] int64, loss mask [b, s])


class Datasets(NamedTuple):
    """Datasets for training, validation and test; None where one is not used.

    Validation and test may each be a mapping from name to dataset; each one is then evaluated by
    itself and logged under its name.
    """

    train: Any  # a SampleDataset, or None
    valid: SampleDataset | Mapping[str, SampleDataset] | None
    test: SampleDataset | Mapping[str, SampleDataset] | None


class DatasetRequest(NamedTuple):
    """What a run needs from its datasets; the program decides how to build them."""

    data: DataConfig
    tokenizer: Tokenizer | None  # None only where plain windows of text are asked for
    num_samples: tuple[int, int, int]  # train, validation, test; 0 where a use is turned off
    min_samples: int  # fewer than this, one global batch, is an error
    seed: int
    is_builder: bool  # whether this rank writes index caches for its node
    wait: Callable[[], None]  # returns once the builders are done
    report_progress: Callable[[str], None] = lambda doing: (
        None
    )  # reports progress to the ranks that wait


class BatchOptions(NamedTuple):
    """The options that turn raw tokens into a micro-batch."""

    data: DataConfig
    tokenizer: Tokenizer


@dataclass(frozen=True, slots=True)
class PretrainTask:
    """A training program as one value: its datasets, its layers and its loss.

    Attributes:
        name: the kind of model, which checkpoints record and are compared by (`gpt`, `bert` ..).
        reads: which kind of dataset the flags ask for, as the checks before training read it.
        datasets: makes the three datasets.
        layers: the model as a list (`gpt_layers`).
        batch: turns a raw batch of the loader into a `MicroBatch` (any device).
        loss: sums the loss over counted tokens, given the last carry and the labels.
        counted: how much `loss` counts, which the labels alone decide: its `count`.
        losses: the names of the losses, one for each sum of `loss`.
        flops_per_token: FLOPs of one token's forward and backward pass, for the MFU and the HFU.
        flops_convention: by which convention they are counted.
        begins_with: kinds of models of which it takes a part to begin with, where it is made to go
            on from another one; of those, the flags of the model have to be its own.
        metrics: what evaluations report beside the losses, by name; each a mean of its own.

    Raises:
        ConfigError: a part is missing, or is no function of so many arguments; all are named.
    """

    name: str
    reads: ProgramData
    datasets: Callable[[DatasetRequest], Datasets]
    layers: Callable[[ModelConfig, ModelBuild], tuple[LayerSpec, ...]]
    batch: Callable[[RawBatch, BatchOptions], MicroBatch]
    loss: Callable[[Carry, Carry, ModelBuild], LossSum]
    counted: Callable[[Carry], Tensor]
    flops_per_token: Callable[[ModelConfig, ModelBuild], TokenFlops]
    flops_convention: str = FLOPS_CONVENTION
    losses: tuple[str, ...] = ("lm loss",)
    begins_with: tuple[str, ...] = ()
    metrics: Mapping[str, Measure] = field(default_factory=dict)

    def __post_init__(self) -> None:
        problems = [*_unfit_functions(self), *_unfit_values(self)]
        if problems:
            raise ConfigError(
                "a part of a training program is not what its place asks for",
                found=f"PretrainTask {self.name!r}: " + "; ".join(problems),
                fix="give each part by its name, PretrainTask(datasets=..., layers=..., ...), as "
                "pretrain_gpt.py does",
            )


# What each function of a task is called with.
_CALLED_WITH: Mapping[str, tuple[str, ...]] = {
    "datasets": ("request",),
    "layers": ("model config", "build"),
    "batch": ("raw batch", "options"),
    "loss": ("last carry", "labels", "build"),
    "counted": ("labels",),
    "flops_per_token": ("model config", "build"),
}


def _unfit_functions(task: PretrainTask) -> Iterator[str]:
    for name, arguments in _CALLED_WITH.items():
        value = getattr(task, name)
        if not callable(value):
            yield f"{name} is {type(value).__name__}, not a function of ({', '.join(arguments)})"
            continue
        try:
            signature = inspect.signature(value)
        except ValueError:
            continue  # written in C, which does not say
        try:
            signature.bind(*arguments)
        except TypeError:
            yield f"{name} is called with ({', '.join(arguments)}) and takes {signature}"


def _unfit_values(task: PretrainTask) -> Iterator[str]:
    if not isinstance(task.name, str) or not task.name:
        yield "name is no text"
    if not isinstance(task.reads, ProgramData):
        yield f"reads is {type(task.reads).__name__}, not ProgramData"
    for name in ("losses", "begins_with"):
        value = getattr(task, name)
        if not isinstance(value, tuple) or not all(isinstance(one, str) for one in value):
            yield f"{name} is {value!r}, not a tuple of names"
    if task.losses == ():
        yield "losses names none"


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The plan of one optimizer step; a pure function of the progress so far."""

    num_microbatches: int
    global_batch_size: int
    learning_rate: float
    weight_decay: float
    seq_length: int  # tokens of each sample, which the raw batches are cut to
    first_sample: int  # the number of its first sample in the whole run
    decoupled_learning_rate: float | None = None  # of the tables of words; None: as all others

    @property
    def rates(self) -> UpdateRates:
        """The rates of its update."""
        return UpdateRates(self.learning_rate, self.weight_decay, self.decoupled_learning_rate)

    def samples(self, microbatch: int, replicas: Group) -> Samples:
        """Return the samples of a micro-batch of this replica, as samplers share them out."""
        size = self.global_batch_size // (self.num_microbatches * replicas.size)
        before = microbatch * replicas.size + replicas.rank
        return Samples(self.first_sample + before * size, size)


def samples_of_passes(
    plan: StepPlan, build: ModelBuild
) -> Callable[[int], AbstractContextManager[None]]:
    """Return the context of a forward pass by the number of its micro-batch: its samples."""
    return lambda microbatch: build.streams.of(plan.samples(microbatch, build.ctx.dp))


@dataclass(frozen=True, slots=True)
class StepReport:
    """The result of one optimizer step: the same numbers on every rank."""

    loss: float  # mean over the counted tokens of the global batch, in nats; of several, the sum
    grad_norm: float  # of that mean's gradient, before clipping
    skipped: bool = False  # the gradients were unusable; weights are unchanged
    overflow: bool = False  # skipped for an overflow that dynamic loss scaling expects
    loss_scale: float = 1.0
    num_zeros: int | None = None
    means: tuple[float, ...] = ()  # of each loss, where there are several
    # Mean over sequences and layers, without its weight: 1 where experts are equally busy.
    load_balancing_loss: float | None = None
    # Tokens of an expert over the mean of its layer's experts: the largest of all.
    most_loaded_expert: float | None = None
    idle_experts: int | None = None  # that no token of the global batch chose, over all layers
    dropped_tokens: float | None = None  # with a capacity, the dropped share of all choices
    # Mean of log^2 Z over the tokens that the first loss counts, without its weight.
    z_loss: float | None = None
    signals: tuple[bool, ...] = ()  # for each that was given to the step: did any rank set it

    @property
    def each_loss(self) -> tuple[float, ...]:
        """The mean of each of the model's losses."""
        return self.means or (self.loss,)


# Waits until a step is done, and returns its report. Raises DataError where nothing counted in it,
# NumericsError at the smallest loss scale, on all ranks alike.
PendingReport = Callable[[], StepReport]


class EvaluationSum(NamedTuple):
    """A loss as a sum over counted tokens, equal on every rank."""

    total: float
    tokens: float  # a sum of weights where tokens have weights
    others: tuple["EvaluationSum", ...] = ()  # the other losses of a model that has several
    metrics: tuple[tuple[str, float], ...] = ()  # name and mean of each metric of the task

    @property
    def mean(self) -> float:
        """Mean loss per counted token, in nats; of several losses the sum of their means."""
        return self.total / self.tokens + sum(other.mean for other in self.others)

    @property
    def means(self) -> tuple[float, ...]:
        """The mean of each loss."""
        return (self.total / self.tokens, *(other.mean for other in self.others))


class EngineState(NamedTuple):
    """The state of an engine that a checkpoint stores.

    The tensors are views of the live ones: reading a checkpoint into them restores the engine,
    once `Engine.restored` is called.
    """

    tensors: tuple[ShardedTensor, ...]
    scalars: JsonObject  # equal on all ranks


class Diagnosis(Protocol):
    """Computes passes of a step again; all ranks call it together, and nothing of the run changes.

    `batches` are the raw micro-batches of the step on this replica, all of them.
    """

    def find_nonfinite(self, batches: Sequence[RawBatch], plan: StepPlan) -> str | None:
        """Return where the first number that is not finite appears; None where none does."""

    def check_repeats(self, batches: Sequence[RawBatch], plan: StepPlan) -> None:
        """Compute the first micro-batch twice; MachineError names the rank whose bits differ."""


class Engine(Protocol):
    """Owns the model, its gradients and the optimizer for one run."""

    @property
    def task(self) -> PretrainTask:
        """The name of the task; checkpoints record it."""

    @property
    def loss_scale(self) -> float:
        """The factor on the next loss before its backward pass; reading it may wait."""

    def start_step(
        self, batches: Iterator[RawBatch], plan: StepPlan, signals: Sequence[bool] = ()
    ) -> PendingReport:
        """Start one optimizer step over `plan.num_microbatches` micro-batches.

        The next step may be started before the report is read. A step whose gradients are not
        finite, or that counts nothing, changes nothing, whenever that is read.

        Args:
            signals: flags of this rank, as many on each rank; the report has those of all ranks.
        """

    def evaluate(self, batches: Iterator[RawBatch], num_microbatches: int) -> EvaluationSum:
        """Return the loss over `num_microbatches` of this replica and as many of each other one."""

    def measure(
        self, batches: Iterator[RawBatch], num_microbatches: int, measure: Measure
    ) -> list[Tensor]:
        """Return the values of `measure` per micro-batch, in order, with dropout off.

        Each is [2, ...], total above count, on the ranks of the last stage; nothing on the others.
        """

    def state(self, *, optimizer: bool) -> EngineState:
        """Return the model, and the optimizer if asked, as named parts of whole tensors."""

    def restored(self, scalars: JsonObject, *, optimizer: bool) -> None:
        """Take over the values loaded into the tensors of `state`, and the scalars."""

    def live(self) -> Live | None:
        """Return what a save in DeepSpeed's own layout needs; None where another engine trains."""

    def diagnosis(self) -> Diagnosis | None:
        """Return what computes steps again to find errors; None where another engine trains."""

    def params_norm(self) -> float:
        """Return L2 norm of all parameters of the model, replicated ones counted once."""

    def check_replicas(self) -> None:
        """Compare the parameters over replicas; NumericsError names the rank that differs."""
