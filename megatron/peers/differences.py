"""What differs between ranks that should be equal, in words: the values, and who holds which."""

from collections.abc import Mapping, Sequence

from megatron.errors import ConfigError


def differences(facts_of_ranks: Sequence[Mapping[str, str]], *, may_lack: str | None = None) -> str:
    """Return the differing values with the ranks that hold them; empty when all agree.

    Facts whose names begin with `may_lack` are compared between the ranks that have them.
    """
    lines = []
    for name in sorted({name for one in facts_of_ranks for name in one}):
        optional = may_lack is not None and name.startswith(may_lack)
        holders: dict[str, list[int]] = {}
        for rank, one in enumerate(facts_of_ranks):
            if optional and name not in one:
                continue
            holders.setdefault(one.get(name, "(nothing)"), []).append(rank)
        if len(holders) > 1:
            values = ", ".join(f"{value} on {named(ranks)}" for value, ranks in holders.items())
            lines.append(f"{name}: {values}")
    return "; ".join(lines)


def launch_problem(facts_of_ranks: Sequence[Mapping[str, str]]) -> ConfigError | None:
    """Return the error of ranks that were started with other flags, code or versions."""
    difference = differences(facts_of_ranks)
    if not difference:
        return None
    return ConfigError(
        "the ranks do not run the same thing",
        found=difference,
        fix="start every rank with the same flags, code, Python and torch",
    )


def named(ranks: Sequence[int]) -> str:
    """Return `rank 0, 3`, or how many there are where they are many."""
    if len(ranks) <= 4:
        return "rank " + ", ".join(map(str, ranks))
    return f"{len(ranks)} ranks ({ranks[0]}, {ranks[1]}, ... {ranks[-1]})"
