"""Draw where the time of a supervised run went: what each start did, one beside the other.

`python -m megatron.supervise --accounts FOLDER ...` keeps the accounts that this reads.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from megatron.errors import ConfigError
from megatron.peers.goodput import Account, accounts_in, goodput, goodput_by_start
from megatron.program import run_program

# Okabe and Ito's colours, which can be distinguished with colour blindness too.
COLOURS = {
    "steps kept": "#009E73",
    "steps repeated": "#E69F00",
    "waiting for data": "#0072B2",
    "evaluation": "#56B4E9",
    "saves": "#CC79A7",
    "starting": "#F0E442",
    "down": "#D55E00",
}


def draw(accounts: Sequence[Account], picture: Path, *, ended: float | None = None) -> None:
    """Write `picture` (.png): a column for each start, as wide as it was long, shares on top.

    Args:
        ended: when the run ended, in seconds since 1970; with the last account if not given.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    began, ended = accounts[0].began, ended or accounts[-1].updated
    by_start = goodput_by_start(accounts, began=began, ended=ended)
    lefts = [(account.began - began) / 60 for account in accounts]
    widths = [each.total / 60 for each in by_start]
    figure, axes = pyplot.subplots(figsize=(9, 4))
    floor = [0.0] * len(by_start)
    for name, colour in COLOURS.items():
        shares = [100 * each.parts[name] / each.total if each.total else 0.0 for each in by_start]
        if any(shares):
            axes.bar(lefts, shares, widths, floor, align="edge", color=colour, label=name)
        floor = [low + share for low, share in zip(floor, shares)]
    whole = goodput(accounts, began=began, ended=ended)
    axes.set_title(f"{whole.share:.1%} of the time in steps that were kept, {whole.starts} starts")
    axes.set_xlabel("minutes")
    axes.set_ylabel("percent of each start")
    axes.set_xlim(0, (ended - began) / 60)
    axes.set_ylim(0, 100)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.tight_layout()
    figure.savefig(picture, dpi=110)
    pyplot.close(figure)


def main(argv: Sequence[str] | None = None) -> None:
    """Read the command line and draw."""
    parser = argparse.ArgumentParser(prog="goodput_picture", description=__doc__)
    parser.add_argument("accounts", help="the folder that --accounts of the supervisor named")
    parser.add_argument("picture", type=Path, help="the picture to write (.png)")
    given = parser.parse_args(argv)
    accounts = accounts_in(given.accounts)
    if not accounts:
        raise ConfigError(
            "there is no account to draw",
            found=given.accounts,
            fix="name the folder that --accounts of the supervisor named",
        )
    draw(accounts, given.picture)


if __name__ == "__main__":
    run_program(main)
