"""Which layouts save a checkpoint and which load it, and what is compared after.

`python -m tests.laws.checkpoints.reshard` loads every checkpoint of `LAYOUTS` at every layout; the
slice among the tests (test_reshard.py) holds every value of a source beside every value of a
target. Right after the load the weights and the optimizer's state have to be the saved bits; then
the run goes on, and its losses have to be those of one process that was never interrupted. Without
DeepSpeed that is in float64; between the engines in float32, the widest type that DeepSpeed has.
"""

import argparse
import gc
import itertools
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

import megatron.training
from megatron.config.run import RunConfig
from megatron.engine.base import Engine
from megatron.progress import Progress
from tests.support.ranks import run_on_ranks
from tests.support.tiny import (
    FP32,
    FP64,
    MODELS,
    Part,
    Record,
    assert_all_close,
    assert_close,
    tiny_run,
    train,
    whole,
    write_tiny_corpus,
)

SAVED_AT, ALL = 2, 4  # the second loss after a load depends on the state of the optimizer
SLICE = 44  # pairs among the tests, at least
GLOBAL_BATCH = 8
# Allowed for a start of processes, and for each run of them, on a busy machine.
START_S, RUN_S = 90.0, 10.0
# Far above rounding: AdamW divides by the size of a gradient, and one that is nothing but rounding
# would become a step of full length, by another sign in each engine.
_ADAMW = {"adam_eps": 1e-4, "weight_decay": 0.1}
_GATED = {"swiglu": True, "ffn_hidden_size": 24, "num_attention_heads": 8, "num_query_groups": 4}

KINDS: Mapping[str, Mapping[str, Any]] = {
    "native": {},
    "distributed": {"use_distributed_optimizer": True},
    "interleaved": {
        "pipeline_schedule": "interleaved",
        "num_virtual_stages_per_pipeline_rank": 2,
    },
    "context": {"context_parallel_size": 2, "use_distributed_optimizer": True},
    **{f"zero{stage}": {"deepspeed": True, "zero_stage": str(stage)} for stage in range(4)},
}
RUNS: Mapping[str, Mapping[str, Any]] = {
    "gated, grouped, untied, rotary": {
        **MODELS["llama"],
        **_ADAMW,
        "hidden_dropout": 0.1,  # what is dropped goes on at another layout, too
        "attention_dropout": 0.1,
    },
    "tied, learned": _ADAMW,
    "gated, grouped, tied, learned": {**_GATED, **_ADAMW},
    "untied, rotary, sgd": {
        "untie_embeddings_and_output_weights": True,
        "position_embedding_type": "rope",
        "optimizer": "sgd",
        "sgd_momentum": 0.9,
        "lr": 0.05,
    },
}


class Layout(NamedTuple):
    """A grid of ranks, and the engine and the sharing of optimizer state on it."""

    tp: int
    pp: int
    dp: int
    kind: str

    @property
    def world_size(self) -> int:
        """Ranks that it takes."""
        return self.tp * self.pp * self.dp * int(self.flags.get("context_parallel_size", 1))

    @property
    def is_deepspeed(self) -> bool:
        """Whether DeepSpeed trains."""
        return self.kind.startswith("zero")

    @property
    def flags(self) -> dict[str, Any]:
        """Its flags, for `tiny_run`."""
        return {
            "tensor_model_parallel_size": self.tp,
            "pipeline_model_parallel_size": self.pp,
            # A pipeline of one micro-batch would be none.
            "micro_batch_size": GLOBAL_BATCH // (self.dp * (2 if self.pp > 1 else 1)),
            "sequence_parallel": self.tp > 1 and self.kind == "native",
            **KINDS[self.kind],
        }

    def __str__(self) -> str:
        return f"tp{self.tp} pp{self.pp} dp{self.dp} {self.kind}"


NATIVE = (
    Layout(1, 1, 1, "native"),
    Layout(2, 1, 1, "native"),
    Layout(4, 1, 1, "native"),
    Layout(1, 2, 1, "interleaved"),
    Layout(1, 4, 1, "native"),
    Layout(1, 1, 2, "distributed"),
    Layout(1, 1, 4, "distributed"),
    Layout(2, 1, 2, "distributed"),
    Layout(1, 2, 2, "native"),
    Layout(2, 2, 1, "native"),
    Layout(2, 2, 2, "distributed"),
    Layout(2, 1, 1, "context"),
)
DEEPSPEED = (
    Layout(1, 1, 1, "zero1"),
    Layout(1, 1, 2, "zero2"),
    Layout(1, 1, 4, "zero3"),
    Layout(2, 1, 2, "zero3"),
    Layout(4, 1, 1, "zero2"),
    Layout(1, 2, 2, "zero1"),
    Layout(2, 2, 1, "zero0"),
    Layout(1, 4, 1, "zero0"),
)
# Those native ones that a checkpoint goes to from DeepSpeed, and comes from.
BESIDE_DEEPSPEED = (
    Layout(1, 1, 1, "native"),
    Layout(2, 1, 2, "distributed"),
    Layout(1, 2, 1, "interleaved"),
    Layout(4, 1, 1, "native"),
    Layout(1, 4, 1, "native"),
    Layout(1, 1, 4, "distributed"),
)


class Pair(NamedTuple):
    """A checkpoint of `model` that `source` saves and `target` loads."""

    model: str
    source: Layout
    target: Layout
    precision: str

    def __str__(self) -> str:
        return f"{self.source} -> {self.target} ({self.model}, {self.precision})"


def every_pair() -> tuple[Pair, ...]:
    """Every source with every target; of the models each in turn."""
    models = list(RUNS)
    pairs = []
    for precision, sources, targets in (
        ("fp64", NATIVE, NATIVE),
        ("fp32", DEEPSPEED, (*BESIDE_DEEPSPEED, *DEEPSPEED)),
        ("fp32", BESIDE_DEEPSPEED, DEEPSPEED),
    ):
        for (at, source), (to, target) in itertools.product(enumerate(sources), enumerate(targets)):
            pairs.append(Pair(models[(at + to) % len(models)], source, target, precision))
    return tuple(pairs)


Combination = tuple[Any, ...]


def combinations_in(pair: Pair) -> Iterator[Combination]:
    """Each size and engine of the source beside each of the target, and what each side is alone."""
    yield from itertools.product(_values(pair.source), _values(pair.target))
    for side, layout in (("source", pair.source), ("target", pair.target)):
        yield side, layout.kind
        yield side, layout.world_size
        yield side, layout.tp, pair.model


def _values(layout: Layout) -> Iterator[tuple[str, Any]]:
    for axis in ("tp", "pp", "dp", "is_deepspeed"):
        yield axis, getattr(layout, axis)


@cache
def cover(at_least: int = SLICE, seed: int = 0) -> tuple[Pair, ...]:
    """Return few pairs with every combination of `every_pair`, and at least the given number."""
    left = list(every_pair())
    random.Random(seed).shuffle(left)
    missing = {combination for pair in left for combination in combinations_in(pair)}
    chosen: list[Pair] = []
    saved: set[tuple[str, Layout, str]] = set()
    while missing or len(chosen) < at_least:

        def gain(pair: Pair) -> float:
            new = sum(combination in missing for combination in combinations_in(pair))
            again = saving(pair) in saved
            cost = pair.target.world_size + (0 if again else pair.source.world_size)
            return (new + 0.5) / cost

        best = max(left, key=gain)
        left.remove(best)
        chosen.append(best)
        missing.difference_update(combinations_in(best))
        saved.add(saving(best))
    return tuple(chosen)


def saving(pair: Pair) -> tuple[str, Layout, str]:
    """The part of a pair that defines the checkpoint that it needs."""
    return pair.model, pair.source, pair.precision


def config_of(
    corpus: str, model: str, precision: str, layout: Layout | None = None, **flags: Any
) -> RunConfig:
    """A run of `model`; without a layout on one process, in other micro-batches."""
    return tiny_run(
        corpus,
        num_layers=4,
        train_iters=ALL,
        distributed_timeout_minutes=3.0,
        log_level="error",
        **RUNS[model],
        **(layout.flags if layout else {"micro_batch_size": GLOBAL_BATCH // 4}),
        fp64=precision == "fp64",
        **flags,
    )


class Loaded(NamedTuple):
    """What a rank held right after its load (nothing, if it loads none), and what it did."""

    state: dict[str, Part]
    record: Record
    cpu_s: float  # of this rank


def train_from(runs: Sequence[tuple[str, RunConfig]]) -> list[Loaded]:
    """A body for `run_on_ranks`: several runs; the one that fails is named."""

    def loading(config: RunConfig, engine: Engine, *rest: Any) -> Progress:
        progress = REAL_LOAD(config, engine, *rest)
        if config.checkpoint.load is not None:
            for tensor in engine.state(optimizer=True).tensors:
                pieces = [(part.box.slices, part.view.clone()) for part in tensor.parts]
                states[-1][tensor.name] = Part(tensor.global_shape, pieces)
        return progress

    gc.freeze()  # DeepSpeed collects garbage often, which need not look at all of torch
    megatron.training.load_checkpoint = loading  # type: ignore[assignment]
    states: list[dict[str, Part]] = []
    found = []
    for name, config in runs:
        states.append({})
        began = time.process_time()
        try:
            record = train(config)
            found.append(Loaded(states[-1], record, time.process_time() - began))
        except BaseException as error:
            error.add_note(f"run: {name}")
            raise
    return found


REAL_LOAD = megatron.training.load_checkpoint


class Verdict(NamedTuple):
    """What came of a pair; `fault` is empty where the law held."""

    pair: Pair
    fault: str
    cpu_s: float  # of all ranks that load; of the first pair of a checkpoint also of the saving

    def __str__(self) -> str:
        return f"BROKEN: {self.pair}\n    {self.fault}" if self.fault else f"held: {self.pair}"


class Job(NamedTuple):
    """A run, and where it takes place."""

    name: str
    layout: Layout
    config: RunConfig


def run_jobs(jobs: Iterable[Job]) -> Iterator[tuple[Job, list[Loaded]]]:
    """Every job with what its ranks held; those of one world and engine share their processes."""
    groups: dict[tuple[int, bool], list[Job]] = {}
    for job in jobs:
        place = (job.layout.world_size, job.layout.is_deepspeed)
        groups.setdefault(place, []).append(job)
    for (world_size, deepspeed), of_group in sorted(groups.items()):
        by_rank = run_on_ranks(
            world_size,
            train_from,
            [(job.name, job.config) for job in of_group],
            timeout_s=START_S + RUN_S * len(of_group),
            deepspeed=deepspeed,
        )
        for job, *ranks in zip(of_group, *by_rank):
            yield job, ranks


def verdicts(pairs: Sequence[Pair], corpus: str, folder: Path) -> Iterator[Verdict]:
    """Save what the pairs need, load it, and compare."""
    saved: dict[tuple[str, Layout, str], list[Loaded]] = {}
    unpaid: Counter[tuple[str, Layout, str]] = Counter()
    needed = list(dict.fromkeys(saving(pair) for pair in pairs))
    alone = Layout(1, 1, 1, "native")
    references = list(dict.fromkeys((pair.model, pair.precision) for pair in pairs))
    straight: dict[tuple[str, str], Record] = {}
    jobs = [
        Job(f"straight, {model}, {precision}", alone, config_of(corpus, model, precision))
        for model, precision in references
    ]
    jobs += [
        Job(
            f"{layout} saves {model}, {precision}",
            layout,
            config_of(
                corpus,
                model,
                precision,
                layout,
                exit_interval=SAVED_AT,
                save=str(folder / str(at)),
            ),
        )
        for at, (model, layout, precision) in enumerate(needed)
    ]
    keys: dict[str, Any] = dict(zip([job.name for job in jobs], [*references, *needed]))
    for job, ranks in run_jobs(jobs):
        if job.name.startswith("straight"):
            straight[keys[job.name]] = ranks[0].record
        else:
            saved[keys[job.name]] = ranks
            unpaid[keys[job.name]] += sum(rank.cpu_s for rank in ranks)
    by_name = {str(pair): pair for pair in pairs}
    loads = [
        Job(
            name,
            pair.target,
            config_of(
                corpus,
                pair.model,
                pair.precision,
                pair.target,
                load=str(folder / str(needed.index(saving(pair)))),
            ),
        )
        for name, pair in by_name.items()
    ]
    for job, ranks in run_jobs(loads):
        pair = by_name[job.name]
        fault = fault_in(pair, saved[saving(pair)], ranks, straight[pair.model, pair.precision])
        cpu_s = sum(rank.cpu_s for rank in ranks) + unpaid.pop(saving(pair), 0.0)
        yield Verdict(pair, fault, cpu_s)


def fault_in(
    pair: Pair, saved: Sequence[Loaded], loaded: Sequence[Loaded], straight: Record
) -> str:
    """Where the law is broken; nothing where it holds."""
    try:
        check(pair, saved, loaded, straight)
    except AssertionError as error:
        return " ".join(str(error).split())[:300] or "an assertion without words"
    return ""


def check(pair: Pair, saved: Sequence[Loaded], loaded: Sequence[Loaded], straight: Record) -> None:
    """The law for one pair."""
    before = whole([ranks.record for ranks in saved])
    after = whole([Record(state=ranks.state) for ranks in loaded])
    assert before.keys() == after.keys() == straight.state.keys(), "not the same tensors"
    kinds = {name.rpartition("/")[0].partition("/")[0] for name in after}
    assert kinds == {"model", "optimizer"}, f"only {kinds}"
    for name, tensor in before.items():
        assert tensor.dtype == after[name].dtype, f"{name} has another type after the load"
        assert torch.equal(tensor, after[name]), f"{name} has other bits after the load"
    tolerance = FP64 if pair.precision == "fp64" else FP32
    first = loaded[0].record
    for ranks in loaded:
        assert ranks.record.steps == first.steps, "ranks are told different numbers"
    assert first.progress == straight.progress, "progress differs"
    assert_close(first.losses, straight.losses[SAVED_AT:], tolerance)
    assert_close(first.grad_norms, straight.grad_norms[SAVED_AT:], tolerance)
    # Weights and optimizer; moments are far smaller than the weights, and compared to their size.
    assert_all_close(whole([ranks.record for ranks in loaded]), whole([straight]), tolerance)


def main(argv: Sequence[str] | None = None) -> None:
    """Every pair, or the slice; exit code 1 if the law is broken for one of them."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.laws.checkpoints.reshard", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--slice", action="store_true", help="only what is among the tests")
    parser.add_argument("--list", action="store_true", help="say the pairs, and run none")
    flags = parser.parse_args(argv)
    pairs = cover() if flags.slice else every_pair()
    if flags.list:
        print("\n".join(map(str, pairs)))
        return
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as place:
        corpus, found = write_tiny_corpus(Path(place) / "corpus"), []
        for verdict in verdicts(pairs, corpus, Path(place)):
            found.append(verdict)
            print(f"{time.monotonic() - began:6.0f} s {verdict}", flush=True)
    broken = [verdict for verdict in found if verdict.fault]
    cpu_s = sum(verdict.cpu_s for verdict in found)
    print(
        f"{len(found)} pairs in {time.monotonic() - began:.0f} s ({cpu_s:.0f} s of CPU time in "
        f"all ranks), {len(broken)} broken"
    )
    sys.exit(bool(broken))


if __name__ == "__main__":
    main()
