"""All mutants, by subject; those of the list of checks are read off the list itself."""

import re
from pathlib import Path

from tests.mutants import (
    assumptions,
    checkpoints,
    context_parallel,
    cpu_products,
    expert_parallel,
    experts,
    formats,
    in_flight,
    inference,
    local_checkpoints,
    parallelism,
    peers,
    planning,
    programs,
    samples,
    serving,
    sharding,
    training,
    wiring,
)
from tests.mutants.decoding import constrained, served, speculative, stages, text_to_text
from tests.mutants.models import prefix, retrieval, t5, vit
from tests.mutants.mutant import Mutant

CHECKS = "megatron/preflight/checks.py"


def removed_checks(root: Path) -> tuple[Mutant, ...]:
    """Return a mutant for each line of the list of checks before training: one without it."""
    lines = (root / CHECKS).read_text(encoding="utf-8").splitlines(keepends=True)
    return tuple(
        Mutant(
            f"{line.strip().strip('*,')} is in the list",
            CHECKS,
            line,
            "",
            "tests/unit/preflight/test_checks.py::test_every_check_that_is_written_is_run_once",
        )
        for line in lines
        if re.fullmatch(r"    (\*\w+|\w+\.|\*\w+\.)\w*,\n", line)
    )


MODULES = (
    *(parallelism, context_parallel, expert_parallel, experts, sharding, training, checkpoints),
    cpu_products,
    *(formats, samples, programs, wiring, planning, peers, assumptions),
    *(in_flight, local_checkpoints, inference, serving, prefix, speculative),
    *(constrained, stages, served, text_to_text, retrieval, t5, vit),
)
MUTANTS: dict[str, tuple[Mutant, ...]] = {
    subject: mutants for module in MODULES for subject, mutants in module.SUBJECTS.items()
} | {"list of checks": removed_checks(Path(__file__).resolve().parents[2])}
