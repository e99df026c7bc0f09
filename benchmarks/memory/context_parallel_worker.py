"""One rank of `context_parallel.py`: a few steps, of which the last one's tensors are counted."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.data_worker import Answer, serve
from benchmarks.memory_table import peak_of_step
from benchmarks.workload import workload

WARMUP = 1  # steps, after which whatever is kept is there


def peak(flags: list[str], vocab_size: int) -> Answer:
    """Join the other ranks, train, and return the most bytes of a step's tensors together."""
    with workload(flags, vocab_size=vocab_size) as work:
        for number in range(WARMUP):
            work.step(work.tokens(number))
        alive = peak_of_step(lambda: work.step(work.tokens(WARMUP)))
        return {"bytes": alive + work.build.loss_state.kept_bytes}


if __name__ == "__main__":
    serve({"peak": peak})
