"""Corruption: whatever is done to the files of a checkpoint is found before a weight changes.

The slice among the tests; `python -m tests.laws.checkpoints.corruption` flips a thousand bits.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron.config.checkpoint import Verification
from megatron.config.run import RunConfig
from megatron.progress import Progress
from tests.laws.checkpoints import corruption
from tests.laws.checkpoints.corruption import EARLIER, EARLIER_ONE, FOUND, GOOD, UNHARMED, Result
from tests.support.ranks import run_on_ranks
from tests.support.tiny import Record

FLIPS = 100
TRACKER = "latest_checkpointed_iteration.txt"
# The tracker file holds nothing but a number, for people and other programs to read and write. So
# white space around it is not looked at (of "3\n" one bit makes "3\v"), and of the bits of the
# number one makes it the earlier iteration, which is loaded with a warning: as if it were set back.
NUMBER_IS_THE_SAME = {
    f"bit 0 of byte 1 of {TRACKER}",
    f"the last byte of {TRACKER}",
    f"the second half of {TRACKER}",
    f"byte 1 of {TRACKER}",
    f"a line end after {TRACKER}",
}
NUMBER_IS_THE_EARLIER = {f"bit 0 of byte 0 of {TRACKER}"}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> list[corruption.Saved]:
    return corruption.save_all(Path(tmp_path_factory.mktemp("corruption")))


def test_damage_is_found_before_anything_changes_and_is_named(
    saved: list[corruption.Saved],
) -> None:
    results = [result for one in corruption.judge_all(saved, FLIPS, 1) for result in one]
    assert [result for result in results if result.found not in GOOD] == []
    kinds = {result.kind: 0 for result in results}
    for result in results:
        kinds[result.kind] += 1
        if result.found == UNHARMED:
            allowed = result.what in NUMBER_IS_THE_SAME or result.kind == "foreign, beside ours"
            assert allowed, result
        elif result.found == EARLIER_ONE:
            assert result.what in NUMBER_IS_THE_EARLIER
    flips = {kind: count for kind, count in kinds.items() if kind.startswith("bit flipped")}
    assert sum(flips.values()) == FLIPS
    assert flips.pop("bit flipped, tracker") == 32, "every bit, of both"
    assert min(flips.values()) >= 16
    assert len(flips) == 3
    assert min(kinds.values()) >= 8, kinds


def trust_lengths_and_judge(run: corruption.Saved, flips: int) -> tuple[list[Result], Record]:
    """The result of the law for a load that checks only lengths."""
    real = corruption.REAL_LOAD

    def trusting(config: RunConfig, *rest: Any) -> Progress:
        flags = replace(config.checkpoint, checkpoint_verify=Verification.SIZE)
        return real(replace(config, checkpoint=flags), *rest)

    corruption.REAL_LOAD = trusting  # type: ignore[assignment]
    return corruption.judge(run, flips, 1)


def test_a_load_that_does_not_look_would_be_seen(saved: list[corruption.Saved]) -> None:
    ((results, _),) = run_on_ranks(1, trust_lengths_and_judge, saved[0], FLIPS)
    of_shards = [r.found for r in results if r.kind == "bit flipped, shard"]
    assert sum(found.startswith("not noticed, and ['") for found in of_shards) > len(of_shards) / 2


def test_the_table_counts_and_is_written_between_its_marks(tmp_path: Path) -> None:
    results = [
        Result("a", "1", FOUND),
        Result("a", "2", UNHARMED),
        Result("b", "3", "not noticed"),
        Result("b", "4", EARLIER_ONE),
    ]
    lines = corruption.table(results)
    assert lines[2:] == [
        "| a | 2 | 1 | 1 | 0 | 0 |",
        "| b | 2 | 0 | 0 | 1 | 1 |",
        "| all | 4 | 1 | 1 | 1 | 1 |",
    ]
    begin, end = corruption.MARKS
    page = tmp_path / "page.md"
    page.write_text(f"before\n{begin}\nold\n{end}\nafter\n")
    corruption.write(page, ["new"])
    assert page.read_text() == f"before\n{begin}\n\nnew\n\n{end}\nafter\n"
    page.write_text("nothing")
    with pytest.raises(ValueError, match="has no place for the table"):
        corruption.write(page, ["new"])
    assert all(mark in corruption.PAGE.read_text() for mark in corruption.MARKS)


def test_files_are_put_back_as_they_were(tmp_path: Path) -> None:
    (tmp_path / "one").write_bytes(b"1")
    changed = {"one": None, "two/three": b"3", "four": b"4"}
    with corruption.Damaged(tmp_path, changed):
        assert sorted(p.name for p in tmp_path.rglob("*")) == ["four", "three", "two"]
    assert [p.name for p in tmp_path.rglob("*")] == ["one"]
    assert (tmp_path / "one").read_bytes() == b"1"


def test_what_should_not_be_is_told_from_what_is_found() -> None:
    damage = corruption.Damage("kind", "what", {}, ("file", "tensor"))
    verdict = corruption._verdict
    assert verdict(damage, None, ["w"], []) == UNHARMED
    assert verdict(damage, None, ["w"], ["w"]) == "not noticed, and ['w'] are wrong"
    assert verdict(damage, "tensor of file", [], ["w"]) == FOUND
    assert verdict(damage, "of file", [], ["w"]) == "found, but without naming ['tensor']: of file"
    assert verdict(damage, "tensor of file", ["w"], ["w"]).startswith("found after ['w'] had")
    assert verdict(damage, "another error, KeyError: 1", [], ["w"]).startswith("another error")
    assert EARLIER < corruption.SAVED
