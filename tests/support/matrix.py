"""Which compositions of parallelism and model are compared with one process, and how.

A `Case` is one value of every axis; its words (`str`) name it, and `Case.of` reads them. `cover`
finds few cases that hold every feasible pair (or triple) of values, the same ones every time. What
a reader would get wrong: some values exclude each other (no sequence parallelism without tensor
parallelism), so only feasible combinations count.
"""

import itertools
import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

from megatron.config.experts import LoadBalancing
from megatron.config.run import RunConfig
from tests.support.tiny import BF16, FP32, FP64, Record, tiny_run, train, whole

WORLD_SIZES = (2, 4, 8)
LARGEST = 4  # ranks along one axis
STEPS = 3
GLOBAL_BATCH = 12
_CANDIDATES = 40  # looked at for each case that is added
_SMALLEST = 1e-3  # what a weight's largest value counts as, at least
_ALONE = 3  # samples of a micro-batch where one process trains: four micro-batches


class Grid(NamedTuple):
    """The part of a case whose values depend on each other."""

    tp: int
    sequence: str
    pp: int
    schedule: str
    stages: str
    cp: int
    exchange: str
    feed_forward: str
    ep: int
    expert_parts: str
    dp: int
    optimizer_state: str
    reduction: str
    recompute: str

    @property
    def world_size(self) -> int:
        """Ranks that it takes; those of ep are among them."""
        return self.tp * self.pp * self.cp * self.dp

    @property
    def etp(self) -> int:
        """Ranks that share the matrices of an expert."""
        return {"as-tp": self.tp, "whole": 1, "halves": 2}[self.expert_parts]

    @property
    def shares_experts_out(self) -> bool:
        """Whether tokens go to their experts."""
        return self.ep > 1 or self.etp != self.tp


_SHARDED = ("sharded-gradients", "fully-sharded", "fully-prefetched")
GRID_AXES: Mapping[str, Sequence[Any]] = {
    "tp": (1, 2, 4),
    "sequence": ("no-sp", "sp", "sp-overlapped"),
    "pp": (1, 2, 4),
    "schedule": ("no-pipeline", "gpipe", "1f1b", "interleaved", "zero-bubble"),
    "stages": ("even", "uneven"),
    "cp": (1, 2, 4),
    "exchange": ("no-cp", "p2p", "all_gather", "a2a"),
    "feed_forward": ("dense", "experts"),
    "ep": (1, 2, 4),
    "expert_parts": ("as-tp", "whole", "halves"),
    "dp": (1, 2, 4),
    "optimizer_state": (
        *("replicated", "distributed", "gather-overlapped", "on-host"),
        *_SHARDED,
    ),
    "reduction": ("at-end", "overlapped"),
    "recompute": ("keep", "uniform", "split-uniform", "block", "selective", "offload"),
}
FREE: Mapping[str, Sequence[str]] = {
    "embeddings": ("tied", "untied"),
    "attention": ("mha", "gqa"),
    "mlp": ("gelu", "swiglu"),
    "norm": ("layernorm", "rmsnorm"),
    "positions": ("learned", "rotary", "alibi"),
    "optimizer": ("adamw", "sgd"),
    "dropout": ("no-dropout", "dropout"),
}
AXES = {**GRID_AXES, **FREE}
_SIZES = ("tp", "pp", "cp", "dp", "ep")
# The words of a case leave out what it does not use.
_SILENT = frozenset(
    {
        *("no-sp", "no-pipeline", "even", "no-cp", "dense", "as-tp", "replicated", "at-end"),
        *("keep", "no-dropout"),
    }
)

_FULLY_SHARDED = {"data_parallel_sharding_strategy": "optim_grads_params"}
_FLAGS: Mapping[Any, Mapping[str, Any]] = {
    "sp": {"sequence_parallel": True},
    "sp-overlapped": {"sequence_parallel": True, "tp_comm_overlap": True},
    # Stages of two of the schedules compute while their messages travel.
    "gpipe": {"pipeline_schedule": "gpipe", "overlap_p2p_communication": True},
    "1f1b": {"pipeline_schedule": "1f1b"},
    "interleaved": {
        "pipeline_schedule": "interleaved",
        "num_virtual_stages_per_pipeline_rank": 2,
        "overlap_p2p_communication": True,
    },
    "zero-bubble": {"pipeline_schedule": "zero-bubble"},
    "p2p": {"cp_comm_type": "p2p"},
    "all_gather": {"cp_comm_type": "all_gather"},
    "a2a": {"cp_comm_type": "a2a"},
    "experts": {
        "num_experts": 4,
        "moe_ffn_hidden_size": 16,
        "moe_shared_expert_intermediate_size": 8,
        "add_bias_linear": False,
        "moe_router_load_balancing_type": LoadBalancing.SEQ_AUX_LOSS,
        "moe_aux_loss_coeff": 0.1,
    },
    "whole": {"expert_tensor_parallel_size": 1},
    "halves": {"expert_tensor_parallel_size": 2},
    "distributed": {"use_distributed_optimizer": True},
    "gather-overlapped": {"use_distributed_optimizer": True, "overlap_param_gather": True},
    # AdamW's; that of SGD stays.
    "on-host": {"use_distributed_optimizer": True, "optimizer_cpu_offload": True},
    "sharded-gradients": {"data_parallel_sharding_strategy": "optim_grads"},
    "fully-sharded": _FULLY_SHARDED,
    "fully-prefetched": {**_FULLY_SHARDED, "overlap_param_gather": True},
    # Buckets small enough that there are several, of which some wait for others.
    "overlapped": {"overlap_grad_reduce": True, "ddp_bucket_size": 1000},
    "uniform": {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 2,
    },
    "split-uniform": {"recompute_granularity": "full", "distribute_saved_activations": True},
    "block": {
        "recompute_granularity": "full",
        "recompute_method": "block",
        "recompute_num_layers": 1,
    },
    "selective": {
        "recompute_granularity": "selective",
        "recompute_modules": ("core_attn", "mlp", "layernorm"),
    },
    "offload": {"cpu_offloading_num_layers": 1},
    "untied": {"untie_embeddings_and_output_weights": True},
    "gqa": {"num_query_groups": 4},
    "swiglu": {"swiglu": True, "ffn_hidden_size": 24},
    "rmsnorm": {"normalization": "RMSNorm"},
    "rotary": {"position_embedding_type": "rope"},
    "alibi": {"position_embedding_type": "alibi"},
    "adamw": {"weight_decay": 0.1},
    "sgd": {"optimizer": "sgd", "lr": 0.05},
    "dropout": {"hidden_dropout": 0.1, "attention_dropout": 0.1},
    "dropout-of-hidden-states": {"hidden_dropout": 0.1},
}


class Model(NamedTuple):
    """What is trained: everything of a case that one process trains too."""

    layers: int
    feed_forward: str
    embeddings: str
    attention: str
    mlp: str
    norm: str
    positions: str
    optimizer: str
    dropout: str


@dataclass(frozen=True)
class Case:
    """One composition: a grid, and what is trained on it."""

    grid: Grid
    free: tuple[str, ...]  # one value of each of FREE, in order

    @classmethod
    def of(cls, words: str) -> "Case":
        """The case that its words name; an axis that they leave out has its first value."""
        values: dict[str, Any] = {axis: options[0] for axis, options in AXES.items()}
        for word in words.split():
            axis, value = _meaning(word)
            values[axis] = value
        case = cls(
            Grid(*(values[axis] for axis in GRID_AXES)), tuple(values[axis] for axis in FREE)
        )
        if not is_feasible(case.grid):
            raise ValueError(f"values that exclude each other: {words}")
        return case

    @property
    def values(self) -> dict[str, Any]:
        """The value of every axis."""
        return {**self.grid._asdict(), **dict(zip(FREE, self.free))}

    @property
    def model(self) -> Model:
        """What one process has to train for comparison."""
        # Two chunks on each of four stages need eight layers, uneven stages more than one each.
        even = self.grid.stages == "even"
        layers = 8 if self.grid.pp == 4 and (self.grid.schedule == "interleaved" or not even) else 4
        model = Model(layers, self.grid.feed_forward, *self.free)
        if model.dropout == "dropout" and self.grid.exchange in ("p2p", "all_gather"):
            return model._replace(dropout="dropout-of-hidden-states")  # of scores it is refused
        return model

    @property
    def flags(self) -> dict[str, Any]:
        """Its flags, for `tiny_run`."""
        grid = self.grid
        # Three or six micro-batches: more than one, and no multiple of the stages.
        microbatches = 6 if grid.pp == 4 else 3
        flags = _flags_of(self.model) | {
            "micro_batch_size": GLOBAL_BATCH // (grid.dp * microbatches),
            "tensor_model_parallel_size": grid.tp,
            "pipeline_model_parallel_size": grid.pp,
            "context_parallel_size": grid.cp,
            "expert_model_parallel_size": grid.ep,
        }
        if grid.stages == "uneven":
            flags["pipeline_layer_counts"] = {2: (1, 3), 4: (1, 3, 2, 2)}[grid.pp]
        for value in grid:
            flags |= _FLAGS.get(value, {})
        if self.model.optimizer == "sgd":
            flags["optimizer_cpu_offload"] = False
        return flags

    def __str__(self) -> str:
        sizes = [f"{axis}{self.values[axis]}" for axis in _SIZES if axis != "ep"]
        sizes += [f"ep{self.grid.ep}"] if self.grid.ep > 1 else []
        rest = [value for axis, value in self.values.items() if axis not in _SIZES]
        return " ".join([*sizes, *(value for value in rest if value not in _SILENT)])


def flags_alone(model: Model) -> dict[str, Any]:
    """The flags of the same training on one process, in other micro-batches."""
    return _flags_of(model) | {"micro_batch_size": _ALONE}


def _flags_of(model: Model) -> dict[str, Any]:
    flags: dict[str, Any] = {
        "num_layers": model.layers,
        "num_attention_heads": 8,
        "global_batch_size": GLOBAL_BATCH,
        "train_iters": STEPS,
        "eval_interval": STEPS - 1,
        "eval_iters": 1,
    }
    for value in model:
        flags |= _FLAGS.get(value, {})
    return flags


def _meaning(word: str) -> tuple[str, Any]:
    for axis, options in AXES.items():
        for option in options:
            if word == (f"{axis}{option}" if axis in _SIZES else option):
                return axis, option
    raise ValueError(f"no axis has a value that is called {word}")


@cache
def grids(largest: int = LARGEST, *, dense: bool = False) -> tuple[Grid, ...]:
    """Every feasible grid with at most `largest` ranks along an axis, smallest worlds first.

    Args:
        dense: without experts.
    """
    # Axis by axis, in the order of their product, of which one in 200 is feasible.
    found = [Grid._make(options[0] for options in GRID_AXES.values())]
    for axis, options in GRID_AXES.items():
        options = [one for one in options if axis not in _SIZES or one <= largest]
        options = ["dense"] if axis == "feed_forward" and dense else options
        longer = (grid._replace(**{axis: option}) for grid in found for option in options)
        found = [grid for grid in longer if all(rule(grid) for rule in _RULES.get(axis, ()))]
    return tuple(sorted(found, key=lambda grid: grid.world_size))


def is_feasible(grid: Grid) -> bool:
    """Whether the values do not exclude each other."""
    return all(rule(grid) for rules in _RULES.values() for rule in rules)


# Which values do not exclude each other, under the last of the axes that a rule reads.
_RULES: Mapping[str, Sequence[Callable[[Grid], bool]]] = {
    "sequence": [lambda grid: grid.sequence == "no-sp" or grid.tp > 1],
    "schedule": [lambda grid: (grid.schedule == "no-pipeline") == (grid.pp == 1)],
    # With chunks every chunk has one layer.
    "stages": [
        lambda grid: grid.stages == "even" or (grid.pp > 1 and grid.schedule != "interleaved")
    ],
    "exchange": [lambda grid: (grid.exchange == "no-cp") == (grid.cp == 1)],
    "expert_parts": [
        lambda grid: not grid.shares_experts_out or grid.feed_forward == "experts",
        # Unless it is what it would be by itself.
        lambda grid: grid.expert_parts == "as-tp" or grid.etp != grid.tp,
        lambda grid: not grid.shares_experts_out or grid.tp == 1 or grid.sequence != "no-sp",
    ],
    "dp": [
        lambda grid: grid.world_size in WORLD_SIZES,
        # The ranks of ep and etp are ranks of a stage, and take other tokens.
        lambda grid: (grid.tp * grid.cp * grid.dp) % (grid.ep * grid.etp) == 0,
    ],
    # There gradients of weights come long after their use.
    "optimizer_state": [
        lambda grid: grid.schedule != "zero-bubble" or grid.optimizer_state not in _SHARDED
    ],
    "reduction": [
        lambda grid: (
            grid.dp * grid.cp > 1
            or (grid.optimizer_state, grid.reduction) == ("replicated", "at-end")
        )
    ],
    # What is split over tp already cannot be split again.
    "recompute": [
        lambda grid: grid.recompute != "split-uniform" or (grid.tp > 1 and grid.sequence == "no-sp")
    ],
}


Combination = tuple[tuple[str, Any], ...]


@cache
def cover(
    strength: int, *, largest: int = LARGEST, dense: bool = False, seed: int = 0
) -> tuple[Case, ...]:
    """Few cases that together hold every combination of `strength` values of some `grids`."""
    draw = random.Random(seed)
    missing = dict.fromkeys(combinations(strength, largest, dense=dense))
    cases: list[Case] = []
    while missing:
        wanted = dict(next(iter(missing)))
        feasible = _grids_with(_of_grids(wanted.items()), largest, dense)
        candidates = [_random_case(feasible, wanted, draw) for _ in range(_CANDIDATES)]
        best = max(candidates, key=lambda case: _gain(case, strength, missing))
        cases.append(best)
        for combination in held(best, strength):
            missing.pop(combination, None)
    return tuple(cases)


def combinations(
    strength: int, largest: int = LARGEST, *, dense: bool = False
) -> Iterator[Combination]:
    """Every choice of a value for each of `strength` axes that one of some `grids` has."""
    for axes in itertools.combinations(AXES, strength):
        for chosen in itertools.product(*(AXES[axis] for axis in axes)):
            combination = tuple(zip(axes, chosen))
            if _grids_with(_of_grids(combination), largest, dense):
                yield combination


def held(case: Case, strength: int) -> Iterator[Combination]:
    """Every choice of `strength` values that a case holds."""
    return itertools.combinations(case.values.items(), strength)


def _of_grids(combination: Iterable[tuple[str, Any]]) -> Combination:
    return tuple((axis, value) for axis, value in combination if axis in GRID_AXES)


@cache
def _grids_with(wanted: Combination, largest: int, dense: bool) -> tuple[Grid, ...]:
    if not wanted:
        return grids(largest, dense=dense)
    *before, (axis, value) = wanted
    fewer = _grids_with(tuple(before), largest, dense)
    return tuple(grid for grid in fewer if getattr(grid, axis) == value)


def _random_case(feasible: Sequence[Grid], wanted: Mapping[str, Any], draw: random.Random) -> Case:
    grid = draw.choice(feasible)
    return Case(grid, tuple(wanted.get(axis) or draw.choice(FREE[axis]) for axis in FREE))


def _gain(case: Case, strength: int, missing: Mapping[Combination, None]) -> float:
    """Combinations that a case adds, for what it costs: processes share two cores."""
    new = sum(combination in missing for combination in held(case, strength))
    return new / (1 + case.grid.world_size / 4)


class Precision(NamedTuple):
    """In what is computed, and how far from one process results may be."""

    name: str
    flags: Mapping[str, Any]
    tolerance: float  # of losses and gradient norms, relative
    parameters: float  # relative to the largest value of each
    is_narrow: bool = True
    dense: bool = False  # without experts, whose choice rounding changes
    alone: tuple[str, ...] = ()  # in what one process trains, of which the nearest counts; (): this


# A bias begins at zero, so at the end it is nothing but the gradients of three steps, which passed
# through a dozen roundings of 2^-9 each. One process in bfloat16 is up to 4e-2 away from float64 in
# the biases of the first layers, and 3e-2 from itself in other micro-batches.
BF16_PARAMETERS = 5e-2

PRECISIONS = {
    "fp64": Precision("fp64", {}, FP64, FP64, is_narrow=False),
    "fp32": Precision("fp32", {"fp64": False}, FP32, FP32),
    # The band is that of a number beside the truth, and one process is beside it too: after a step
    # of AdamW up to 2.1e-2 in a gradient norm. Ranks may be nearer to the one or to the other.
    "bf16": Precision(
        *("bf16", {"fp64": False, "bf16": True}, BF16, BF16_PARAMETERS),
        dense=True,
        alone=("bf16", "fp64"),
    ),
}
TRUTH = PRECISIONS["fp64"]
# Below float64 AdamW turns a gradient that is nothing but rounding (that of the keys' biases) into
# a step of full length, so two runs can end this far apart in single weights: steps in opposite
# directions. Losses, gradient norms, and parameters under SGD are held to the precision's band.
ADAMW_APART = 2 * STEPS * 0.01  # the learning rate of `tiny_run`


def runs_of(cases: Iterable[Case], corpus: str, precision: Precision = TRUTH) -> list[RunConfig]:
    """The configs of some cases."""
    return [tiny_run(corpus, **case.flags, **precision.flags) for case in cases]


def runs_alone(
    models: Iterable[Model], corpus: str, precision: Precision = TRUTH
) -> list[RunConfig]:
    """The configs of the same models on one process."""
    return [tiny_run(corpus, **flags_alone(model), **precision.flags) for model in models]


def train_named(runs: Sequence[tuple[str, RunConfig]]) -> list[Record]:
    """A body for `run_on_ranks`: several runs; the one that fails is named."""
    records = []
    for name, config in runs:
        try:
            records.append(train(config))
        except BaseException as error:
            error.add_note(f"case: {name}")
            raise
    return records


class Difference(NamedTuple):
    """One number or tensor beside that of one process."""

    where: str
    size: float  # relative; inf where there is nothing to compare
    tolerance: float
    is_relative: bool = False  # else a yes or no, or in the units of the weights

    @property
    def is_wrong(self) -> bool:
        """Whether it is more than rounding."""
        return not self.size <= self.tolerance

    def __str__(self) -> str:
        return f"{self.where}: {self.size:.1e} apart, {self.tolerance:.0e} allowed"


def compare(
    case: Case, precision: Precision, records: Sequence[Record], alone: Sequence[Record]
) -> "Verdict":
    """All ranks of a case beside one process with the same model, or the nearest of several."""
    beside = [_differences(case, precision, records, one) for one in alone]
    nearest = (min(of_one, key=lambda one: one.size) for of_one in zip(*beside, strict=True))
    return Verdict(case, precision.name, tuple(nearest))


class Verdict(NamedTuple):
    """What came of a case."""

    case: Case
    precision: str
    found: tuple[Difference, ...]  # in the order in which a run gets there

    @property
    def first(self) -> Difference | None:
        """Where it first differs from one process, if it does."""
        return next((difference for difference in self.found if difference.is_wrong), None)

    @property
    def largest(self) -> Difference:
        """The largest difference, in terms of what is allowed."""
        measured = [difference for difference in self.found if difference.tolerance]
        return max(measured, key=lambda difference: difference.size / difference.tolerance)

    def __str__(self) -> str:
        if self.first is None:
            return f"equal: {self.precision} {self.case}; at most {self.largest}"
        count = sum(difference.is_wrong for difference in self.found)
        return (
            f"DIFFERS: {self.precision} {self.case}\n"
            f"    first in {self.first} ({count} of {len(self.found)} differ)\n"
            f"    alone: {command(self.case, self.precision)}"
        )


def command(case: Case, precision: str) -> str:
    """What runs one case again."""
    return f'python -m tests.laws.layouts.matrix --precision {precision} --case "{case}"'


def _differences(
    case: Case, precision: Precision, records: Sequence[Record], alone: Record
) -> Iterator[Difference]:
    assert len(set(alone.losses)) == STEPS, "the weights are meant to move"
    for step in range(STEPS):
        for name, of in (("losses", "loss"), ("grad_norms", "gradient norm")):
            values = [getattr(record, name)[step] for record in records]
            expected = getattr(alone, name)[step]
            yield _of_numbers(f"{of} of step {step}", values, expected, precision)
    for at, evaluation in enumerate(alone.evaluations):
        values = [record.evaluations[at].mean for record in records]
        yield _of_numbers(f"loss of evaluation {at}", values, evaluation.mean, precision)
    # Below float64 an optimizer's state is held to what it does to the parameters.
    prefix = "model/" if precision.is_narrow else ""
    try:
        here, there = whole(records, prefix=prefix), whole([alone], prefix=prefix)
    except AssertionError as error:
        yield Difference(str(error), math.inf, 0.0)
        return
    same_names = here.keys() == there.keys()
    yield Difference("names of parameters", 0.0 if same_names else math.inf, 0.0)
    for name in sorted(here.keys() & there.keys()):
        one, other = here[name].double(), there[name].double()
        size = float((one - other).abs().max())
        if precision.is_narrow and case.model.optimizer == "adamw":
            yield Difference(f"{name} (absolute)", size, ADAMW_APART)
        else:
            # Biases begin at zero; squares of gradients are small, and are compared as they are.
            smallest = _SMALLEST if name.startswith("model/") else 1e-30
            size /= max(float(other.abs().max()), smallest)
            yield Difference(name, size, precision.parameters, is_relative=True)


def _of_numbers(
    where: str, values: Sequence[float], expected: float, precision: Precision
) -> Difference:
    size = abs(values[0] - expected) / max(abs(expected), 1e-30)
    size = size if len(set(values)) == 1 else math.inf  # every rank has the same
    return Difference(where, size, precision.tolerance, is_relative=True)
