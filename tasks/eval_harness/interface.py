"""What of lm-eval-harness we rely on, checked before it is relied on.

Its interface changes without notice between versions: an adapter that is called in another way
than it was written for gives numbers that mean nothing.
"""

import inspect
from collections.abc import Mapping
from types import MappingProxyType

from megatron.errors import MachineError

TESTED = "0.4.13"  # newer 0.4 versions are taken where the interface is the same
_SERIES = "0.4."

# The methods that an adapter has to have, and the parameters that they are called with.
ABSTRACT: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "eot_token_id": (),
        "tok_encode": ("self", "string", "add_special_tokens", "kwargs"),
        "_loglikelihood_tokens": ("self", "requests", "kwargs"),
        "loglikelihood_rolling": ("self", "requests", "disable_tqdm"),
        "generate_until": ("self", "requests", "disable_tqdm"),
    }
)


def check_version(version: str) -> None:
    """Raise MachineError for an untested version of the harness."""
    tested = tuple(int(part) for part in TESTED.split("."))
    try:
        found = tuple(int(part) for part in version.split(".")[:3])
    except ValueError:
        found = ()
    if not version.startswith(_SERIES) or found < tested:
        raise MachineError(
            "this version of lm-eval-harness is not known here",
            found=f"lm-eval {version}; tested with {TESTED}",
            fix=f"pip install 'lm-eval>={TESTED},<0.5'",
        )


def check_interface(template: type) -> None:
    """Raise MachineError when the class that adapters derive from has changed."""
    wanted = set(getattr(template, "__abstractmethods__", ()))
    problems = [f"{name} is new" for name in sorted(wanted - set(ABSTRACT))]
    for name, parameters in ABSTRACT.items():
        method = inspect.getattr_static(template, name, None)
        if method is None:
            problems.append(f"{name} is gone")
        elif parameters:
            found = tuple(inspect.signature(method).parameters)
            if found != parameters:
                problems.append(f"{name}({', '.join(found)}), expected ({', '.join(parameters)})")
    if problems:
        raise MachineError(
            "lm-eval-harness calls models in another way than this adapter implements",
            found="; ".join(problems),
            fix=f"pip install lm-eval=={TESTED}",
        )
