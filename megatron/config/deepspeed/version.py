"""The version of DeepSpeed in the tests; compared with the installed one without an import."""

from importlib import metadata

from megatron.errors import MachineError

TESTED = "0.19"  # the versions that the laws are run with: 0.19.x
INSTALL = f"python -m pip install --no-build-isolation 'deepspeed=={TESTED}.*'"


def version_problem() -> MachineError | None:
    """Return the problem of the installed DeepSpeed: missing, too old or too new; or None."""
    fix = f"{INSTALL}, or leave out --deepspeed: the native engine trains the same models"
    try:
        found = metadata.version("deepspeed")
    except metadata.PackageNotFoundError:
        return MachineError("--deepspeed was given, but DeepSpeed is not installed", fix=fix)
    release, tested = found.split(".")[:2], TESTED.split(".")
    if release == tested:
        return None
    old = [int(part) for part in release] < [int(part) for part in tested]
    return MachineError(
        f"this DeepSpeed is too {'old' if old else 'new'}",
        found=f"deepspeed {found}; tested with {TESTED}.x",
        fix=fix,
    )
