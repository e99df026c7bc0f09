"""Which checks of a launch can be run on a machine that is not of the cluster, and why not others.

A check that asks for devices, packages, keys or memory would answer for the wrong machine. One that
opens files answers where they exist.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from megatron.checkpoint.files.store import place
from megatron.errors import ConfigError
from megatron.preflight import (
    checkpoint,
    compiling,
    data,
    deepspeed,
    fp8,
    machine,
    memory,
    trackers,
)
from megatron.preflight.checks import CHECKS
from megatron.preflight.run import Check, RunPlan
from megatron.preflight.supply import absent_corpora

_OF_A_NODE: Mapping[Check, str] = {
    machine.software_is_new_enough: "it asks for Python and torch of a node",
    machine.backend_follows_device: "it asks for the devices of a node",
    fp8.device_multiplies_fp8: "it asks for the devices of a node",
    deepspeed.deepspeed_has_the_precision: "it asks for the devices of a node",
    memory.training_fits_in_memory: "it asks for the memory of a node; --memory-gib "
    "compares a rehearsed step with a number",
    compiling.compilers_are_installed: "it asks for compilers and packages of a node",
    deepspeed.deepspeed_is_installed: "it asks for packages of a node",
    trackers.trackers_are_installed: "it asks for packages of a node",
    trackers.trackers_have_their_keys: "it asks for keys in the environment of a node",
}
_OPEN_CORPORA: tuple[Check, ...] = (
    data.corpora_open_and_are_whole,
    data.corpora_fit_the_tokenizer,
    data.splits_hold_enough_samples,
)


class ChecksHere(NamedTuple):
    """The checks of a launch that this machine can run, and for each other one why it cannot."""

    runnable: tuple[Check, ...]
    not_run: Mapping[str, str]  # by the name of the check


def checks_here(plan: RunPlan) -> ChecksHere:
    """Return which of the checks of a training can be run off its cluster."""
    reasons = {check: reason for check, reason in _OF_A_NODE.items()}
    reasons |= dict(_of_files(plan))
    return ChecksHere(
        tuple(check for check in CHECKS if check not in reasons),
        {check.__name__: reasons[check] for check in CHECKS if check in reasons},
    )


def local_folder(folder: str | None) -> Path | None:
    """Return a folder that the flags name, where it exists on this machine.

    An address of a store of objects does not.
    """
    if folder is None:
        return None
    try:
        location = place(folder)
    except ConfigError:
        return None
    return location if isinstance(location, Path) and location.exists() else None


def _of_files(plan: RunPlan) -> Iterator[tuple[Check, str]]:
    """Yield each check of files that do not exist here."""
    try:
        absent = absent_corpora(plan)
    except ConfigError:
        absent = ()  # the checks report it
    if absent:
        why = f"these corpora do not exist here: {', '.join(absent)}"
        yield from ((check, why) for check in _OPEN_CORPORA)
    flags = plan.config.checkpoint
    if flags.save is not None and local_folder(flags.save) is None:
        yield machine.save_folder_can_be_written, f"--save {flags.save} is not on this machine"
    for flag, folder in (
        ("--load", flags.load),
        ("--pretrained-checkpoint", flags.pretrained_checkpoint),
    ):
        if folder is not None and local_folder(folder) is None:
            yield (
                checkpoint.checkpoint_to_load_exists,
                f"{flag} {folder} is not on this machine",
            )
