"""Limits are positive numbers with units."""

from dataclasses import fields

import pytest

from megatron.errors import ConfigError
from megatron.serving.limits import ServerLimits


@pytest.mark.parametrize("name", [each.name for each in fields(ServerLimits)])
def test_a_limit_below_its_least_is_refused_by_its_flag(name: str) -> None:
    flag = f"--{name.replace('_', '-')}"
    with pytest.raises(ConfigError, match="a limit of the server is too small") as caught:
        ServerLimits(**{name: -1})
    assert caught.value.found == f"{flag} -1"


def test_sizes_are_in_bytes() -> None:
    limits = ServerLimits(max_body_kib=2, max_header_kib=3)
    assert (limits.max_body_bytes, limits.max_header_bytes) == (2048, 3072)
