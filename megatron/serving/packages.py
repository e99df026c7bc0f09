"""The packages of the extra `serve`, and the releases that the server was tested with.

Nothing else of this package is imported before `check_packages` has found them.
"""

from collections.abc import Collection
from importlib import metadata

from megatron.errors import ConfigError

# By the name of a distribution: from the first release on, before the second.
TESTED: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "starlette": ((1, 0), (2,)),
    "uvicorn": ((0, 54), (0, 55)),  # its protocol class is extended, so one series only
    "msgspec": ((0, 22), (0, 23)),
    "prometheus-client": ((0, 20), (1,)),
    "llguidance": ((1, 9), (2,)),
}
INSTALL = "pip install 'megatron-verified[serve]'"


def check_packages(names: Collection[str] | None = None) -> None:
    """Check that packages of the extra are installed, in releases that were tested.

    Args:
        names: of distributions; None: all that the server needs.

    Raises:
        ConfigError: one is missing or of another release; the message has the command to install.
    """
    names = TESTED if names is None else names
    problems = [text for name in names if (text := _problem(name, _version(name))) is not None]
    if problems:
        raise ConfigError(
            "packages are needed that are not installed, or not in a tested release",
            found=", ".join(problems),
            fix=INSTALL,
        )


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _problem(name: str, version: str | None) -> str | None:
    if version is None:
        return f"no {name}"
    first, before = TESTED[name]
    numbers = tuple(int(part) for part in version.split(".")[:3] if part.isdigit())
    if first <= numbers < before:
        return None
    wanted = f">={'.'.join(map(str, first))},<{'.'.join(map(str, before))}"
    return f"{name} {version} (tested: {wanted})"
