"""A process that measures jobs and returns JSON, and the client that sends the jobs.

Standard library and NumPy only: the peers' Python runs the serving side too. Time is taken inside
the process, around the job alone, so starting it costs nothing that is counted. What a reader
would get wrong: `cpu` is of all threads of that process, and `peak_mb` is by how much the process
grew beyond the most it ever held, so it means something only in a fresh one.
"""

import hashlib
import json
import os
import resource
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

Answer = dict[str, Any]

_DIGEST_AT_A_TIME = 1 << 22


class Clock:
    """Measures a `with` block; `answer()` returns the result of a job."""

    def __enter__(self) -> "Clock":
        self._peak = _peak_mb()
        self._wall, self._cpu = time.perf_counter(), time.process_time()
        return self

    def __exit__(self, *error: object) -> None:
        self.cpu = time.process_time() - self._cpu
        self.wall = time.perf_counter() - self._wall
        self.peak_mb = _peak_mb() - self._peak

    def answer(self, **more: Any) -> Answer:
        """Return the measured numbers, and the other results of the job."""
        return {"wall": self.wall, "cpu": self.cpu, "peak_mb": self.peak_mb, **more}


class WorkerError(RuntimeError):
    """A job failed, or its process did not start."""


class Worker:
    """A process of `python script` that runs one job at a time, until its `with` block ends.

    It sees none of the PYTHON* variables of this process, so that the peers' packages and ours
    cannot be mixed up.

    Args:
        environment: variables on top of those of this process.
    """

    def __init__(
        self, python: str | Path, script: str | Path, environment: Mapping[str, str] | None = None
    ) -> None:
        self.started = time.time()
        self._process = subprocess.Popen(
            [str(python), "-E", "-W", "ignore", str(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | (environment or {}),
        )

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *error: object) -> None:
        with self._process:
            if error[0] is not None:
                self._process.kill()

    def ask(self, job: str, **arguments: Any) -> Answer:
        """Return the answer of `job`; WorkerError has the traceback of a job that failed."""
        assert self._process.stdin is not None  # noqa: S101  # invariant: pipes
        assert self._process.stdout is not None  # noqa: S101  # invariant: pipes
        try:
            self._process.stdin.write(json.dumps({"job": job, **arguments}) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise WorkerError(f"the process of the job {job} ended: {self._process.args!r}")
        answer: Answer = json.loads(line)
        if "error" in answer:
            raise WorkerError(f"the job {job} failed:\n{answer['error']}")
        return answer


def serve(jobs: Mapping[str, Callable[..., Answer]]) -> None:
    """Run the jobs read from standard input, until it ends."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not stand among the answers
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = jobs[request.pop("job")](**request)
        except Exception:
            answer = {"error": traceback.format_exc()}
        replies.write(json.dumps(answer) + "\n")
        replies.flush()


def digest_of(arrays: Iterable[Any]) -> str:
    """Return a digest of the numbers in some arrays, independent of their dtype."""
    import numpy as np  # clients do not need it

    digest = hashlib.sha256()
    for array in arrays:
        flat = array.reshape(-1)
        for start in range(0, len(flat), _DIGEST_AT_A_TIME):
            digest.update(flat[start : start + _DIGEST_AT_A_TIME].astype(np.int64).data)
    return digest.hexdigest()


def _peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
