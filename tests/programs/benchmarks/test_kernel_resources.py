"""What ptxas reports is read, and a kernel that does not compile is an error with its reason."""

import json
import subprocess
from pathlib import Path

import pytest

from benchmarks import kernel_resources
from benchmarks.kernel_resources import (
    OPS,
    TABLE,
    Kernel,
    compiled,
    digest_of,
    kernel_sources,
    kernels_in,
)
from megatron.errors import ConfigError, MegatronError

NAME = "_ZN8megatron4cuda15backward_kernelILi8ENS0_8NormRowsINS0_8BFloat16ES3_Lb1EEEEEvT0_b"
REPORT = f"""ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '{NAME}' for 'sm_90'
ptxas info    : Function properties for {NAME}
    32 bytes stack frame, 8 bytes spill stores, 24 bytes spill loads
ptxas info    : Used 70 registers, used 1 barriers, 128 bytes smem
"""


def test_what_ptxas_reports_is_read() -> None:
    (kernel,) = kernels_in(REPORT)
    assert kernel == Kernel(NAME, registers=70, shared_bytes=128, spilled_bytes=32)
    assert kernel.template == "backward_kernel layer_norm"


def test_the_kept_table_is_of_the_kernels_as_they_are() -> None:
    kept = json.loads(TABLE.read_text(encoding="utf-8"))
    assert kept["sources"] == digest_of(kernel_sources(OPS)), "make kernel-resources WRITE=1"
    assert [row for rows in kept["gpus"].values() for row in rows if row["spilled_bytes"]] == []


def test_a_table_names_all_that_a_kernel_includes(tmp_path: Path) -> None:
    for name, text in (
        ("norm.cu", '#include <cuda.h>\n#include "norm.h"\n'),
        ("norm.h", '#include "lanes.h"\n'),
        ("lanes.h", "one"),
        ("norm_cpu.h", "of another kernel"),
    ):
        (tmp_path / name).write_text(text)
    sources = kernel_sources(tmp_path)
    assert [path.name for path in sources] == ["lanes.h", "norm.cu", "norm.h"]
    before = digest_of(sources)
    (tmp_path / "lanes.h").write_text("two")
    assert digest_of(sources) != before


def test_another_report_is_not_taken_for_one_without_spills() -> None:
    with pytest.raises(ValueError, match="ptxas reports in another way: a'"):
        list(kernels_in("Compiling entry function 'a' for 'sm_90'"))


@pytest.mark.parametrize(("registers", "share"), [(32, 1.0), (40, 0.75), (64, 0.5), (70, 0.25)])
def test_registers_limit_the_blocks_that_run_at_once(registers: int, share: float) -> None:
    assert Kernel(NAME, registers, 0, 0).occupancy == share


def test_a_kernel_that_does_not_compile_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = subprocess.CompletedProcess([], 1, stdout="", stderr="norm.cu(3): error: no such name")
    monkeypatch.setattr(kernel_resources.subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(MegatronError, match=r"norm\.cu does not compile for sm_90") as caught:
        compiled("nvcc", Path("norm.cu"), "sm_90")
    assert caught.value.found == "norm.cu(3): error: no such name"


def test_without_nvcc_the_program_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_resources.shutil, "which", lambda _: None)
    with pytest.raises(ConfigError, match="the CUDA kernels cannot be compiled") as caught:
        kernel_resources.main([])
    assert "CUDA toolkit" in caught.value.fix
