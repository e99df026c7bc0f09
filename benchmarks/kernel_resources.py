"""What the CUDA kernels need of a GPU, as nvcc says: registers, shared memory, spills, occupancy.

Compiles every csrc/ops/*.cu for each GPU; none has to be there. `make kernel-resources WRITE=1`
keeps the table, which tests/gpu/test_kernel_resources.py compares. The table names the sources that
it was made of by their digest, so that a kernel cannot change without it.
"""

import argparse
import hashlib
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.errors import ConfigError, MegatronError
from megatron.program import run_program

ROOT = Path(__file__).resolve().parents[1]
OPS = ROOT / "csrc" / "ops"
TABLE = ROOT / "benchmarks" / "results" / "kernel-resources.json"
GPUS = ("sm_80", "sm_90", "sm_100")
FLAGS = ("-cubin", "--resource-usage", "-std=c++17", "-O3", "-DOPS_TARGET=cuda")
# Of a multiprocessor of each of these GPUs.
REGISTERS, WARPS, REGISTERS_AT_ONCE = 65536, 64, 8
BLOCK_WARPS = 16  # the largest block of csrc/ops/norm_cuda.cu


class Kernel(NamedTuple):
    """One compiled kernel."""

    name: str  # mangled
    registers: int
    shared_bytes: int  # static
    spilled_bytes: int  # stores and loads

    @property
    def template(self) -> str:
        """Return the name of the kernel without types, with the norm where its type says it."""
        function = re.search(r"[a-z_]+_kernel(?=I)", self.name)
        centered = re.search(r"NormRowsI\w+?Lb([01])E", self.name)
        norm = "" if centered is None else (" rms_norm", " layer_norm")[int(centered[1])]
        return (function[0] if function else self.name) + norm

    @property
    def occupancy(self) -> float:
        """Return the share of a multiprocessor's warps that registers allow to run at once."""
        taken = -(-self.registers // REGISTERS_AT_ONCE) * REGISTERS_AT_ONCE
        blocks = min(WARPS, REGISTERS // (taken * 32)) // BLOCK_WARPS
        return blocks * BLOCK_WARPS / WARPS


def main(argv: Sequence[str] | None = None) -> None:
    """Compile for every GPU, print the table, and keep it if asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help=f"keep the table in {TABLE.name}")
    options = parser.parse_args(argv)
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        raise ConfigError(
            "the CUDA kernels cannot be compiled",
            found="no nvcc in PATH",
            fix="install the CUDA toolkit, or: PATH=/usr/local/cuda/bin:$PATH",
        )
    table = {
        "nvcc": version_of(nvcc),
        "sources": digest_of(kernel_sources(OPS)),
        "gpus": {gpu: rows_of(nvcc, gpu) for gpu in GPUS},
    }
    # a line for each kernel
    text = re.sub(r"\n {3,4}(?=[\"}])", " ", json.dumps(table, indent=1))
    print(text)
    if options.write:
        TABLE.write_text(text + "\n", encoding="utf-8")


def rows_of(nvcc: str, gpu: str) -> list[dict[str, object]]:
    """Return a row for every template of a kernel, with the most that its types need on `gpu`."""
    templates: dict[str, list[Kernel]] = {}
    for source in sorted(OPS.glob("*.cu")):
        for kernel in compiled(nvcc, source, gpu):
            templates.setdefault(kernel.template, []).append(kernel)
    return [
        {
            "kernel": template,
            "variants": len(kernels),
            "registers": max(kernel.registers for kernel in kernels),
            "shared_bytes": max(kernel.shared_bytes for kernel in kernels),
            "spilled_bytes": max(kernel.spilled_bytes for kernel in kernels),
            "occupancy": min(kernel.occupancy for kernel in kernels),
        }
        for template, kernels in sorted(templates.items())
    ]


def kernel_sources(folder: Path) -> list[Path]:
    """Return the files that CUDA kernels are compiled from: *.cu, and what these include."""
    found: set[Path] = set()
    new = set(folder.glob("*.cu"))
    while new:
        found |= new
        texts = [path.read_text(encoding="utf-8") for path in new]
        names = {name for text in texts for name in re.findall(r'#include "([^"]+)"', text)}
        new = {path for name in names if (path := folder / name).exists()} - found
    return sorted(found)


def digest_of(sources: Sequence[Path]) -> str:
    """Return the SHA-256 of the names and the contents of `sources`."""
    digest = hashlib.sha256()
    for path in sources:
        content = path.read_bytes()
        digest.update(f"{path.name} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def compiled(nvcc: str, source: Path, gpu: str) -> list[Kernel]:
    """Compile `source` for `gpu`; return its kernels.

    Raises:
        MegatronError: it does not compile.
    """
    with tempfile.TemporaryDirectory() as folder:
        run = subprocess.run(
            [nvcc, *FLAGS, f"-arch={gpu}", str(source), "-o", f"{folder}/kernels.cubin"],
            capture_output=True,
            text=True,
            check=False,
        )
    if run.returncode != 0:
        raise MegatronError(
            f"{source.name} does not compile for {gpu}",
            found=run.stderr.strip()[-2000:],
            fix="mend the kernel, or use an nvcc that knows the GPU",
        )
    return list(kernels_in(run.stdout + run.stderr))


def kernels_in(report: str) -> Iterator[Kernel]:
    """Yield the kernels that ptxas reports."""
    for part in report.split("Compiling entry function '")[1:]:
        registers = re.search(r"Used (\d+) registers", part)
        spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", part)
        shared = re.search(r"(\d+) bytes smem", part)
        if registers is None or spills is None:
            raise ValueError(f"ptxas reports in another way: {part[:500]}")
        yield Kernel(
            name=part.partition("'")[0],
            registers=int(registers[1]),
            shared_bytes=int(shared[1]) if shared else 0,
            spilled_bytes=int(spills[1]) + int(spills[2]),
        )


def version_of(nvcc: str) -> str:
    """Return the release of nvcc, such as V13.0.88; another one may use other registers."""
    run = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True)
    found = re.search(r"\bV\d[\d.]*", run.stdout)
    return found[0] if found else "unknown"


if __name__ == "__main__":
    run_program(main)
