"""Example scripts of three other Megatrons: what each starts, with its flags expanded.

Facts, not texts: paths are shortened, and a script that says where files lie names any. They are of
the states that `tests/unit/config/spellings/flags_of_other_megatrons.py` names, or the last before
them that could be had. Scripts that start no program are left out.
"""

from collections.abc import Iterator, Mapping

from tests.support.example_scripts.bigscience import BIGSCIENCE
from tests.support.example_scripts.megatron_lm import MEGATRON_LM
from tests.support.example_scripts.microsoft import CONSISTENT, DENSE, MICROSOFT
from tests.support.example_scripts.script import Script
from tools.launch_scripts.verdicts import Kind

SYSTEMS: Mapping[str, tuple[Script, ...]] = {
    "bigscience's `examples/`": BIGSCIENCE,
    "Microsoft's `examples_deepspeed/`": MICROSOFT,
    "of these, pretraining of dense models": DENSE,
    "of these, without those that contradict themselves": CONSISTENT,
    "Megatron-LM's `examples/`": MEGATRON_LM,
}


def share(scripts: tuple[Script, ...]) -> tuple[int, int]:
    """Return how many scripts run, and how many there are."""
    run = sum(script.num_scripts for script in scripts if script.kind is not Kind.REFUSED)
    return run, sum(script.num_scripts for script in scripts)


def lines_of_the_page() -> Iterator[str]:
    """Yield the tables of docs/migration.md: the shares, and what each refused script lacks."""
    yield from ("| scripts | run |", "|---|---|")
    for system, scripts in SYSTEMS.items():
        run, count = share(scripts)
        yield f"| {system} | {run} of {count} |"
    yield from ("", "| refused | scripts | what is missing |", "|---|---|---|")
    for scripts in (BIGSCIENCE, MICROSOFT, MEGATRON_LM):
        for script in scripts:
            if script.kind is Kind.REFUSED:
                yield f"| `{script.path}` | {script.num_scripts} | {script.why} |"
