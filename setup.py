"""Builds the compiled parts; everything else about the package is in pyproject.toml.

Each extension is optional: without a C++ compiler the package installs and its Python twins give
the same results more slowly. That is said once, loudly, never passed over.
"""

import importlib.util
import os
import platform
import runpy
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

try:
    from pybind11 import setup_helpers as pybind11
except ImportError:
    pybind11 = None

# The blending order compares sums of products: contracting them would change the order.
SAME_ROUNDING = [] if sys.platform == "win32" else ["-O3", "-ffp-contract=off"]

KERNELS = "megatron.ops._kernels"
STACKS = "megatron.peers._native_stacks"
MEMORY = "megatron.ops._cpu_memory"
LOADED_BY_CTYPES = (KERNELS, STACKS, MEMORY)
KERNEL_FLAGS = ["-std=c++17", "-O3", "-g0", "-fPIC", "-fvisibility=hidden"]
LOOP_FLAGS = ["-fopenmp-simd", "-fno-math-errno", "-fno-trapping-math"]
STABLE_ABI = ("TORCH_TARGET_VERSION", "0x020a000000000000")  # 2.10, the oldest that is accepted
# The files csrc/ops/*_cpu.cpp are compiled once for each; the best that a CPU has is used.
INSTRUCTION_SETS = {"plain": []}
if platform.machine().lower() in ("x86_64", "amd64"):
    INSTRUCTION_SETS |= {
        "avx2": ["-mavx2", "-mfma"],
        "avx512": [
            *("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma"),
            "-mprefer-vector-width=512",
        ],
    }
GPUS = ("80", "90", "100")  # A100, H100, B200; newer ones compile the PTX of the last
# 1 builds the CUDA kernels, 0 leaves them out. Unset: where nvcc is found and torch can use them.
BUILD_CUDA = "MEGATRON_BUILD_CUDA"


def extensions() -> list[Extension]:
    """Every compiled module, or none where pybind11 itself is missing."""
    kernels = Extension(KERNELS, sorted(map(str, Path("csrc/ops").glob("*.c*"))), optional=True)
    plain = [kernels]
    if sys.platform == "linux":
        flags = ["-std=c++17", "-fvisibility=hidden"]
        sources = ["csrc/peers/native_stacks.cpp"]
        plain.append(Extension(STACKS, sources, extra_compile_args=flags, optional=True))
        plain.append(
            Extension(
                MEMORY,
                ["csrc/memory/cpu_memory.cpp"],
                depends=["csrc/memory/blocks.h"],
                libraries=["c10"],
                extra_compile_args=["-std=c++20", "-O2", "-g0", "-fvisibility=hidden"],
                optional=True,
            )
        )
    if pybind11 is None:
        say_what_serves_instead("all compiled modules of data", "pybind11 is not installed")
        return plain
    return plain + [
        pybind11.Pybind11Extension(
            f"megatron.data._{name}",
            [f"csrc/data/{name}.cpp"],
            cxx_std=17,
            extra_compile_args=SAME_ROUNDING,
            optional=True,
        )
        for name in ("sample_maps", "token_reader")
    ]


class BuildWhatCanBeBuilt(build_ext):
    """Builds each extension and goes on without those that cannot be built."""

    def build_extension(self, ext: Extension) -> None:
        """Compile `ext`; an `optional` one that fails is announced and left out."""
        try:
            if ext.name == KERNELS:
                self.build_kernels(ext)
            else:
                if ext.name == MEMORY:
                    ext.include_dirs.append(str(torch_folder() / "include"))
                    ext.library_dirs.append(str(torch_folder() / "lib"))
                super().build_extension(ext)
        except Exception as error:
            say_what_serves_instead(ext.name, f"{type(error).__name__}: {error}")
            # setuptools goes on without an optional extension after this error, and few others
            raise CompileError(str(error)) from error

    def get_ext_filename(self, fullname: str) -> str:
        """Return the path of a module; those that are loaded by ctypes fit every Python."""
        if fullname.endswith(tuple(name.rpartition(".")[2] for name in LOADED_BY_CTYPES)):
            return f"{fullname.replace('.', '/')}.so"
        return str(super().get_ext_filename(fullname))

    def build_kernels(self, ext: Extension) -> None:
        """Compile csrc/ops: by the C++ compiler alone, and by nvcc too where it is found."""
        folder = torch_folder()
        if not ext.sources:
            raise FileNotFoundError("csrc/ops is missing")
        nvcc = find_nvcc(wanted=runpy.run_path(str(folder / "version.py"))["cuda"] is not None)
        cuda_objects = self.cuda_objects(nvcc, ext.sources) if nvcc else []
        macros = [STABLE_ABI, *([("MEGATRON_OPS_CUDA", "1")] if cuda_objects else [])]

        def compile_for(source: str, target: str) -> list[str]:
            of_target = [*LOOP_FLAGS, *INSTRUCTION_SETS[target]] if "_cpu" in source else []
            return self.compiler.compile(
                [source],
                output_dir=f"{self.build_temp}/{target}",
                macros=[*macros, ("OPS_TARGET", target)],
                include_dirs=[str(folder / "include")],
                extra_postargs=[*KERNEL_FLAGS, *of_target],
            )

        jobs = [
            (source, target)
            for source in ext.sources
            if source.endswith(".cpp")
            for target in (INSTRUCTION_SETS if "_cpu" in source else ["plain"])
        ]
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
            objects = list(chain(*threads.map(lambda job: compile_for(*job), jobs), cuda_objects))
        path = Path(self.get_ext_fullpath(ext.name))
        path.parent.mkdir(parents=True, exist_ok=True)
        # libtorch.so leads to libtorch_cuda where torch has one. cudart is linked statically, so
        # that the library loads where there is no CUDA.
        linker = [nvcc, "-cudart=static"] if cuda_objects else self.compiler.compiler_cxx
        libraries = [f"-L{folder / 'lib'}", "-ltorch", "-ltorch_cpu"]
        options = ["-Xlinker", "--no-as-needed", "-Xlinker", "--no-undefined"]
        self.spawn([*linker, "-shared", "-o", str(path), *objects, *options, *libraries])

    def cuda_objects(self, nvcc: str, sources: list[str]) -> list[str]:
        """Return the objects of the CUDA kernels, or none, which is announced."""
        made = []
        try:
            codes = subprocess.run(
                [nvcc, "--list-gpu-code"], capture_output=True, text=True, check=True
            ).stdout.split()
            gpus = [gpu for gpu in GPUS if f"sm_{gpu}" in codes]
            flags = [f"-gencode=arch=compute_{gpu},code=sm_{gpu}" for gpu in gpus]
            flags += [f"-gencode=arch=compute_{gpus[-1]},code=compute_{gpus[-1]}", "--threads=0"]
            flags += [
                "-std=c++17",
                "-O3",
                "-DOPS_TARGET=cuda",
                "-Xcompiler=-fPIC,-fvisibility=hidden",
            ]
            Path(self.build_temp).mkdir(parents=True, exist_ok=True)
            for source in (name for name in sources if name.endswith(".cu")):
                made.append(f"{self.build_temp}/{Path(source).stem}.o")
                self.spawn([nvcc, "-c", source, "-o", made[-1], *flags])
        except Exception as error:
            say_what_serves_instead(f"the CUDA kernels of {KERNELS}", f"{nvcc}: {error}")
            return []
        return made


def torch_folder() -> Path:
    """Return where torch is installed; raises ModuleNotFoundError if it is not."""
    torch = importlib.util.find_spec("torch")
    if torch is None or torch.origin is None:
        raise ModuleNotFoundError(
            "torch has to be installed before (pip install --no-build-isolation)"
        )
    return Path(torch.origin).parent


def find_nvcc(*, wanted: bool) -> str | None:
    """Return the path of nvcc in CUDA_HOME or PATH; None without it, or if it is left out."""
    if os.environ.get(BUILD_CUDA, str(int(wanted))) == "0":
        return None
    toolkit = os.environ.get("CUDA_HOME")
    return shutil.which("nvcc", path=f"{toolkit}/bin" if toolkit else None)


def say_what_serves_instead(name: str, reason: str) -> None:
    """Print the one loud notice about a module that will be missing."""
    instead = "The Python twin gives the same results, more slowly."
    if name == STACKS:
        instead = "Of ranks that have stopped, no stacks of native code are printed."
    if name == MEMORY:
        instead = "A training on CPUs takes more memory."
    print(
        f"{'=' * 88}\nNOT BUILT: {name}\n  {reason}\n"
        f"  {instead} To build it: install a C++20\n"
        f"  compiler, pybind11 and torch, then run `python setup.py build_ext --inplace`.\n"
        f"{'=' * 88}",
        file=sys.stderr,
        flush=True,
    )


setup(ext_modules=extensions(), cmdclass={"build_ext": BuildWhatCanBeBuilt})
