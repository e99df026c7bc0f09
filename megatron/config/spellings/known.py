"""Whether a flag of another Megatron has an answer, whichever table it is in."""

from collections.abc import Mapping

from megatron.config.dependent_flags import EXPLAINED
from megatron.config.spellings.aliases import ALIASES, CONVERTED
from megatron.config.spellings.no_effect import NO_EFFECT
from megatron.config.spellings.refused import REFUSED, REMOVED
from megatron.config.spellings.usage import look_up

_TABLES: tuple[Mapping[str, object], ...] = (ALIASES, CONVERTED, NO_EFFECT, REMOVED, REFUSED)


def is_answered(flag: str) -> bool:
    """Return whether a table of other Megatrons' flags has an answer to this one."""
    return flag in EXPLAINED or any(look_up(table, flag) is not None for table in _TABLES)
