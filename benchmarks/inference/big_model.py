"""Load time, tokens per second and peaks of memory of a model that is in memory, or only partly.

`python benchmarks/inference/big_model.py --folder FOLDER` writes a LLaMA of random weights there
and uses it in one process for each placement. How to read the table is in benchmarks/README.md.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from benchmarks.machine import machine
from megatron import host
from megatron.arguments import parse_args
from megatron.checkpoint.load.storage import save_snapshot
from megatron.checkpoint.model_kind import GPT
from megatron.checkpoint.sharded import Snapshot
from megatron.engine.state import model_tensors
from megatron.errors import NumericsError
from megatron.inference.generate import generate
from megatron.inference.offload.place_model import PlacementOptions
from megatron.inference.offload.placement import DeviceMap
from megatron.inference.offload.working_bytes import CacheDemand
from megatron.inference.sampling_params import SamplingParams
from megatron.model.gpt_model import GPTModel
from megatron.model.specs import ModelBuild, VocabSize
from megatron.mpu.context import ParallelContext
from megatron.mpu.random import RandomStreams
from megatron.program import run_program
from megatron.trained_model import load_model_for_inference

VOCABULARY, POSITIONS = 32000, 512
MIB = 2**20


def main(argv: Sequence[str] | None = None) -> None:
    """Write the model, measure every placement in a process of its own, and print a table."""
    flags = _parser().parse_args(argv)
    if flags.measure is not None:
        print(json.dumps(measure(flags, flags.measure)))
        return
    model = flags.folder / "model"
    if not model.exists():
        write_model(model, flags)
    weights = sum(path.stat().st_size for path in model.rglob("*.safetensors"))
    print(f"{weights / MIB:.0f} MiB of weights, {flags.layers} layers, {flags.dtype}")
    head = ("placement", "load s", "peak of load MiB", "tokens/s", "peak MiB", "resident MiB")
    print("".join(f"{name:>20}" for name in head))
    rows: list[dict[str, Any]] = []
    for name in flags.placements:
        drop_from_page_cache(model)
        words = [*(sys.argv[1:] if argv is None else argv), "--measure", name]
        done = subprocess.run(
            [sys.executable, __file__, *words], check=True, capture_output=True, text=True
        )
        rows.append(json.loads(done.stdout.splitlines()[-1]))
        print(line_of(rows[-1]), flush=True)
    if len({json.dumps(row["tokens"]) for row in rows}) > 1:
        raise NumericsError(
            "placements choose other tokens",
            found=str({row["placement"]: row["tokens"] for row in rows}),
            fix="report it: where weights lie changes no bit",
        )
    if flags.json is not None:
        report = {"benchmark": "inference/big_model", "machine": machine(), "rows": rows}
        flags.json.write_text(json.dumps(report, indent=1, default=str) + "\n")


def write_model(folder: Path, flags: argparse.Namespace) -> None:
    """Write a checkpoint of our own format with random weights."""
    words = f"""
        --num-layers {flags.layers} --hidden-size {flags.hidden} --swiglu --normalization RMSNorm
        --num-attention-heads {flags.hidden // 64} --num-key-value-heads {flags.hidden // 256}
        --ffn-hidden-size {flags.hidden * 11 // 4} --position-embedding-type rope
        --disable-bias-linear --untie-embeddings-and-output-weights
        --seq-length {POSITIONS} --max-position-embeddings {POSITIONS} --mock-data
        --tokenizer-type NullTokenizer --vocab-size {VOCABULARY - 1}
        --micro-batch-size 1 --train-iters 1 --lr 1e-4 --device cpu
    """.split()
    config = parse_args([*words, *(["--bf16"] if flags.dtype == "bf16" else [])], world_size=1)
    ctx = ParallelContext.single()
    build = ModelBuild(
        ctx=ctx,
        vocab=VocabSize(VOCABULARY, VOCABULARY),
        seq_length=POSITIONS,
        streams=RandomStreams(1),
        precision=config.precision,
    )
    model = GPTModel(config.model, build)
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        # Rounding is not what is measured, so that values need no rule: gains are near 1.
        mean = 1.0 if parameter.dim() == 1 else 0.0
        parameter.data.normal_(mean, 0.02, generator=generator)
    snapshot = Snapshot(
        tuple(model_tensors(model, ctx)),
        progress={"iteration": 1},
        config=config.to_plain(),
        model_kind=GPT,
    )
    save_snapshot(folder, snapshot, iteration=1, ctx=ctx)


def measure(flags: argparse.Namespace, placement: str) -> dict[str, Any]:
    """Load and generate once, and return times, peaks and tokens."""
    host.reset_peak_resident()
    imported = host.resident_bytes("VmRSS")
    began = time.perf_counter()
    loaded = load_model_for_inference(
        flags.folder / "model", device="cpu", placement=options_of(flags, placement)
    )
    load_s = time.perf_counter() - began
    peak_of_load = host.peak_resident_bytes() - imported
    host.reset_peak_resident()
    prompts = torch.randint(
        VOCABULARY, (flags.batch, flags.prompt), generator=torch.Generator().manual_seed(2)
    ).tolist()
    began = time.perf_counter()
    made = generate(
        loaded.model,
        prompts,
        max_new_tokens=flags.new,
        params=SamplingParams(greedy=True),
        eod=None,
        seed=0,
        ctx=loaded.ctx,
    )
    took = time.perf_counter() - began
    placed = None if loaded.placed is None else loaded.placed.placement
    weights = sum(parameter.nbytes for parameter in loaded.model.parameters())
    return {
        "placement": placement,
        "load_s": load_s,
        "peak_of_load_bytes": peak_of_load,
        "tokens_per_s": flags.batch * flags.new / took,
        "peak_bytes": host.peak_resident_bytes() - imported,
        "resident_bytes": weights if placed is None else placed.weights_in("cpu"),
        "room_bytes": 0 if placed is None else placed.room,
        "tokens": [list(each.tokens) for each in made],
    }


def options_of(flags: argparse.Namespace, placement: str) -> PlacementOptions | None:
    """Return what a placement of the table is."""
    if placement == "resident":
        return None
    limits = {}
    if placement != "all by device map":
        limits["cpu"] = flags.cpu_mib * MIB
    return PlacementOptions(
        device_map=DeviceMap.AUTO,
        demand=CacheDemand(
            sequences=flags.batch, length=flags.prompt + flags.new, step_tokens=flags.prompt
        ),
        max_memory=limits,
        folder=flags.folder / "offload",
    )


def drop_from_page_cache(folder: Path) -> None:
    """Ask the kernel to forget the pages of all files below a folder."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def line_of(row: dict[str, Any]) -> str:
    """Return one measurement as a line of the table."""
    fields = (
        row["placement"],
        f"{row['load_s']:.2f}",
        f"{row['peak_of_load_bytes'] / MIB:.0f}",
        f"{row['tokens_per_s']:.1f}",
        f"{row['peak_bytes'] / MIB:.0f}",
        f"{row['resident_bytes'] / MIB:.0f}",
    )
    return "".join(f"{field:>20}" for field in fields)


PLACEMENTS = ("resident", "all by device map", "some on disk")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="big_model", description=__doc__)
    add = parser.add_argument
    add("--folder", type=Path, required=True, help="where the model is written, and what goes out")
    add("--layers", type=int, default=24, help="of the model [%(default)s]")
    add("--hidden", type=int, default=1024, help="its width, a multiple of 256 [%(default)s]")
    add("--dtype", choices=("fp32", "bf16"), default="bf16", help="[%(default)s]")
    add("--batch", type=int, default=1, help="prompts at a time [%(default)s]")
    add("--prompt", type=int, default=128, help="tokens of a prompt [%(default)s]")
    add("--new", type=int, default=16, help="new tokens of each [%(default)s]")
    add("--cpu-mib", type=int, default=400, help="memory of `some on disk` [%(default)s]")
    add("--placements", nargs="+", choices=PLACEMENTS, default=list(PLACEMENTS), help="[all]")
    add("--json", type=Path, metavar="FILE", help="write the figures there too")
    add("--measure", help=argparse.SUPPRESS)  # in a process of its own
    return parser


if __name__ == "__main__":
    run_program(main)
