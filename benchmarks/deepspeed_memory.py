"""Bytes that a rank needs for each parameter, by ZeRO stage, beside the formula of each stage.

The kernel's high-water mark of fresh processes (VmHWM) is read after a few steps, at two depths of
one model. What does not grow with depth (Python, libraries, the activations and buckets of one
moment) cancels in the difference, and what is left is bytes per parameter. What a reader would get
wrong: the allocator keeps small blocks that were freed, so it is set to return all of them.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.host import peak_resident_bytes

ROOT = Path(__file__).resolve().parents[1]
STAGES = ("native", "native, distributed optimizer", "0", "1", "2", "3")
TOLERANCE = 0.1  # of the formula: what is held for a moment grows a little with depth too
_TOKENS = 16  # so few that activations are nothing beside the weights
_VOCABULARY = 256
_STEPS = 3  # the optimizer's state is there after the first; buckets are reused after the second


class Measured(NamedTuple):
    """One depth: the memory of the fullest rank, and the parameters of the whole model."""

    parameters: int
    peak_bytes: int


def bytes_per_parameter(stage: str, replicas: int) -> float:
    """Return a rank's bytes per half-precision parameter with fp32 gradients, under Adam.

    2 bytes of weight, 4 of gradient, 12 of optimizer (an fp32 copy and two moments; ours keeps half
    of the copy), each divided by the replicas from the stage on that shares it out (Rajbhandari et
    al. 2020, arXiv 1910.02054, section 3, where gradients are in half precision: 16 in all).
    """
    weight, gradient = 2.0, 4.0
    optimizer = 12.0 if stage in ("1", "2", "3") else 10.0
    if stage in ("1", "2", "3", "native, distributed optimizer"):
        optimizer /= replicas
    if stage in ("2", "3"):
        gradient /= replicas
    if stage == "3":
        weight /= replicas
    return weight + gradient + optimizer


def peak_per_parameter(stage: str, replicas: int) -> float:
    """Return a rank's peak bytes per parameter with gloo, which copies what it sends.

    After a step DeepSpeed gathers all weights in one call, of which gloo holds a copy meanwhile: 2
    bytes more. At stage 2 the gradients are gone by then. The native distributed optimizer starts
    the sums of all buckets before it waits for them, and gloo holds a copy of each: 4 bytes more.
    NCCL makes no such copies.
    """
    held = bytes_per_parameter(stage, replicas)
    if replicas == 1:
        return held
    if stage == "native, distributed optimizer":
        return held + 4.0
    gone = 4.0 / replicas if stage == "2" else 0.0
    return max(held, held - gone + 2.0) if stage in ("1", "2") else held


def slope(shallow: Measured, deep: Measured) -> float:
    """Return the bytes that each further parameter costs."""
    more = deep.parameters - shallow.parameters
    if more <= 0:
        raise ValueError(f"the deep model has no more parameters than the shallow one: {more}")
    return (deep.peak_bytes - shallow.peak_bytes) / more


def zero_json(stage: str) -> dict[str, Any]:
    """Return DeepSpeed's JSON with small buckets and few parameters kept in memory."""
    small = 1_000_000
    zero: dict[str, Any] = {
        "stage": int(stage),
        "reduce_bucket_size": small,
        "allgather_bucket_size": small,
    }
    if stage == "3":
        zero |= {
            "stage3_prefetch_bucket_size": small,
            "stage3_param_persistence_threshold": 1000,
            "stage3_max_live_parameters": small,
            "stage3_max_reuse_distance": 1,
            "sub_group_size": small,
        }
    return {"zero_optimization": zero}


def flags_of(stage: str, *, layers: int, hidden: int, json_file: Path) -> list[str]:
    """Return the flags of a run; writes `json_file` where the stage needs one."""
    flags = (
        f"--num-layers {layers} --hidden-size {hidden} --num-attention-heads 8 --bf16 "
        f"--seq-length {_TOKENS} --micro-batch-size 1 --lr 1e-4 --device cpu --log-level warning "
        f"--make-vocab-size-divisible-by 1 --hidden-dropout 0 --attention-dropout 0 "
        f"--tokenizer-type NullTokenizer --vocab-size {_VOCABULARY - 1} "
        f"--data-path made-in-memory --train-iters 100 --ddp-bucket-size 1000000"
    ).split()
    if stage == "native, distributed optimizer":
        flags.append("--use-distributed-optimizer")
    elif stage != "native":
        json_file.write_text(json.dumps(zero_json(stage)))
        flags += ["--deepspeed", "--deepspeed_config", str(json_file)]
    return flags


def measure(stage: str, *, ranks: int, layers: int, hidden: int, within_s: float) -> Measured:
    """Train a few steps in new processes; return the result of the fullest one."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        flags = flags_of(stage, layers=layers, hidden=hidden, json_file=place / "ds.json")
        words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        done = subprocess.run(
            [sys.executable, *words, __file__, "--worker", folder, *flags],
            env=os.environ | {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536"},
            capture_output=True,
            text=True,
            timeout=within_s,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"stage {stage}, {layers} layers:\n{done.stdout}{done.stderr}")
        found = [json.loads((place / f"{rank}.json").read_text()) for rank in range(ranks)]
    return Measured(found[0]["parameters"], max(one["peak_bytes"] for one in found))


def work(folder: str, flags: Sequence[str]) -> None:
    """Train a few steps as one rank, then write its high-water mark to a file."""
    import torch

    from megatron.arguments import parse_args
    from megatron.engine.base import StepPlan
    from megatron.engine.build import build_engine
    from megatron.initialize import initialize_megatron, shutdown_megatron
    from megatron.model.accounting import parameter_count
    from megatron.model_build import model_build
    from megatron.preflight.checks import MODEL_CHECKS
    from megatron.timers import Timers
    from pretrain_gpt import gpt_task

    config = parse_args(flags)
    runtime = initialize_megatron(config, checks=MODEL_CHECKS)
    build, world = model_build(runtime), runtime.context.world
    engine = build_engine(config, gpt_task(), build, runtime.tokenizer, Timers())
    plan = StepPlan(1, world.size, 1e-4, 0.0, _TOKENS, 0)
    for seed in range(_STEPS):
        generator = torch.Generator().manual_seed(seed)
        text = torch.randint(0, _VOCABULARY - 1, (1, _TOKENS + 1), generator=generator)
        engine.start_step(iter([{"text": text}]), plan)()
    peak = peak_resident_bytes()
    parameters = parameter_count(config.model, build.vocab.padded, config.data.seq_length)
    report = {"parameters": parameters, "peak_bytes": peak}
    (Path(folder) / f"{world.rank}.json").write_text(json.dumps(report))
    shutdown_megatron()


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the results as a table."""
    lines = [f"{'stage':32}{'replicas':>9}{'held':>7}{'peak':>7}{'measured':>10}{'off by':>8}"]
    lines += [
        f"{row['stage']:32}{row['replicas']:9d}{row['held']:7.2f}{row['peak']:7.2f}"
        f"{row['measured']:10.2f}{100 * (row['measured'] / row['peak'] - 1):7.1f}%"
        for row in rows
    ]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure the chosen stages; return 1 if one is off by more than the tolerance."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stages", nargs="+", default=list(STAGES), choices=STAGES)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2])
    parser.add_argument("--layers", type=int, nargs=2, default=[8, 16], help="shallow and deep")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--within-s", type=float, default=300.0, help="for each start")
    parser.add_argument("--json", type=Path, help="file for the result")
    given = parser.parse_args(argv)
    rows = []
    for ranks in given.ranks:
        for stage in given.stages:
            shallow, deep = (
                measure(
                    stage, ranks=ranks, layers=layers, hidden=given.hidden, within_s=given.within_s
                )
                for layers in given.layers
            )
            rows.append(
                {
                    "stage": stage,
                    "replicas": ranks,
                    "held": bytes_per_parameter(stage, ranks),
                    "peak": peak_per_parameter(stage, ranks),
                    "measured": slope(shallow, deep),
                    "peak_bytes": [shallow.peak_bytes, deep.peak_bytes],
                    "parameters": [shallow.parameters, deep.parameters],
                }
            )
            print(table(rows[-1:]).splitlines()[-1], flush=True)
    print(table(rows))
    if given.json is not None:
        from benchmarks.machine import machine

        given.json.parent.mkdir(parents=True, exist_ok=True)
        given.json.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n")
    off = [row for row in rows if abs(row["measured"] / row["peak"] - 1) > TOLERANCE]
    return 1 if off else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        work(sys.argv[2], sys.argv[3:])
    else:
        sys.exit(main())
