"""What a figure was measured on."""

import os
import platform
import time
from pathlib import Path
from typing import Any

import torch


def machine() -> dict[str, Any]:
    """Return processor, threads, versions, time and load of the machine."""
    name = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
        name = names[0] if names else name
    return {
        "cpu": name,
        "cores": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "load_1min": os.getloadavg()[0],
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def high_water_mark(status: str | None = None) -> int:
    """Return the most bytes that this process has had in memory, from /proc/self/status.

    `getrusage` tells the same, but of a process that was just started that of its parent.
    """
    return process_bytes("VmHWM", status)


def process_bytes(field: str, status: str | None = None) -> int:
    """Return the bytes of a field of /proc/self/status; OSError where the system has none."""
    text = Path("/proc/self/status").read_text() if status is None else status
    (line,) = (line for line in text.splitlines() if line.startswith(f"{field}:"))
    name, number, unit = line.split()
    if unit != "kB":
        raise ValueError(f"{name} in {unit}")
    return int(number) * 1024
