"""Near duplicates leave a corpus, one of each group stays; and nothing is dropped on a guess."""

import errno
import itertools
import random
from pathlib import Path

import numpy as np
import pytest

from megatron.errors import ConfigError, MachineError
from tests.support.documents import json_lines, words, write_jsonl
from tools.openwebtext import deduplicate
from tools.openwebtext.deduplicate import DuplicateGroups, Spool
from tools.openwebtext.near_duplicates import (
    Likeness,
    NearDuplicates,
    Signer,
    jaccard,
    shingles_of,
)
from tools.preprocessing.documents import DocumentRow

# 128 minima estimate a similarity with a standard error of at most 0.044; this is five of them.
ESTIMATE = 0.22


def changed(text: list[str], count: int, seed: int) -> list[str]:
    return words(count, seed) + text[count:]


def stretches(text: str) -> set[str]:
    return {text[at : at + 5] for at in range(len(text) - 4)}


def run(source: Path, output: Path, *flags: str) -> list[dict[str, object]]:
    deduplicate.main(["--input", str(source), "--output", str(output), *flags])
    return json_lines(output)


def test_shingles_are_the_stretches_of_five_characters() -> None:
    one = words(200, 1)
    for replaced in (0, 10, 60, 200):
        texts = [" ".join(one), " ".join(changed(one, replaced, 2))]
        a, b = map(stretches, texts)
        assert jaccard(*(shingles_of(text, 5) for text in texts)) == len(a & b) / len(a | b)
    assert np.array_equal(shingles_of("A  b\nc \u00c9t", 5), shingles_of("a b c \u00e9t", 5))
    assert len(shingles_of("", 5)) == len(shingles_of("abc", 5)) == len(shingles_of("x" * 99, 5))


def test_the_estimate_is_near_the_share_of_common_shingles() -> None:
    likeness = Likeness()
    signer = Signer(likeness)
    one = words(200, 1)
    for replaced in (0, 10, 30, 60, 100):
        a, b = (shingles_of(" ".join(t), 5) for t in (one, changed(one, replaced, 2)))
        estimate = float((signer.signature(a) == signer.signature(b)).mean())
        assert abs(estimate - jaccard(a, b)) < ESTIMATE
        assert not Likeness(threshold=max(jaccard(a, b), 0.01)).certainly_below(estimate)
    assert likeness.certainly_below(0.5)
    assert np.array_equal(signer.signature(a), Signer(likeness).signature(a))
    assert not np.array_equal(signer.signature(a), Signer(Likeness(seed=1)).signature(a))


@pytest.mark.parametrize("threshold", [0.05, 0.5, 0.7, 0.9, 1.0])
def test_bands_find_nearly_every_pair_at_the_threshold(threshold: float) -> None:
    bands, rows = Likeness(threshold=threshold).bands()
    assert bands * rows <= 128
    assert rows == 1 or 1 - (1 - threshold**rows) ** bands >= 0.99
    assert bands >= 2


def test_what_is_found_is_what_comparing_every_pair_finds() -> None:
    draw = random.Random(3)
    base = [words(60, seed) for seed in range(8)]
    texts = [" ".join(changed(draw.choice(base), draw.randint(0, 25), n)) for n in range(80)]
    shingles = [shingles_of(text, 5) for text in texts]
    likeness = Likeness()
    signer, known = Signer(likeness), NearDuplicates(likeness, shingles.__getitem__)
    found = set()
    for number, own in enumerate(shingles):
        signature = signer.signature(own)
        for match in known.matches(signature, lambda own=own: own, lambda other: True):  # type: ignore[misc]
            assert match.similarity == jaccard(own, shingles[match.number])
            found.add((match.number, number))
        known.insert(number, signature)
    pairs = itertools.combinations(range(len(texts)), 2)
    exact = {(a, b) for a, b in pairs if jaccard(shingles[a], shingles[b]) >= 0.7}
    assert found <= exact
    assert len(exact) > 50
    assert len(found) >= 0.97 * len(exact)


def test_near_duplicates_go_and_the_others_stay_byte_for_byte(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = [" ".join(words(150, seed)) for seed in range(40)]
    copy = texts[3].upper().replace(" ", "  ")
    other_end = " ".join([*texts[5].split()[:-4], "quite", "another", "end"])
    source = write_jsonl(tmp_path / "a.jsonl", [*texts[:20], copy, *texts[20:], other_end, "", ""])
    output, groups = tmp_path / "new" / "out.jsonl", tmp_path / "groups.jsonl"
    run(source, output, "--groups", str(groups))
    lines = source.read_text().splitlines(keepends=True)
    assert output.read_text() == "".join(lines[:20] + lines[21:41] + lines[42:43])
    listed = json_lines(Path(f"{output}.duplicates"))
    assert [(record["dropped"], record["like"]) for record in listed] == [
        (f"{source}:21", f"{source}:4"), (f"{source}:42", f"{source}:6"),
        (f"{source}:44", f"{source}:43"),
    ]  # fmt: skip
    assert listed[0]["similarity"] == "1.000"
    assert json_lines(groups) == [
        {"kept": record["like"], "dropped": [record["dropped"]]} for record in listed
    ]
    assert "kept 41 of 44 documents" in capsys.readouterr().out
    assert sorted(path.name for path in output.parent.iterdir()) == [
        "out.jsonl",
        "out.jsonl.duplicates",
    ]


def chain() -> list[str]:
    """The first and the last have next to nothing in common, each has most with the next."""
    text = words(100, 1)
    return [" ".join([*words(step * 15, 2), *text[step * 15 :]]) for step in range(4)]


@pytest.mark.parametrize(
    ("order", "kept_alone", "kept_linked"),
    [
        ((0, 1, 2, 3), [0, 2], [0]),
        ((0, 3, 1, 2), [0, 1], [0]),  # the first two belong together by what follows
    ],
)
def test_a_chain_is_cut_or_goes_whole(
    tmp_path: Path, order: tuple[int, ...], kept_alone: list[int], kept_linked: list[int]
) -> None:
    texts = [chain()[step] for step in order]
    source = write_jsonl(tmp_path / "a.jsonl", texts)
    alone = run(source, tmp_path / "alone.jsonl")
    assert [record["id"] for record in alone] == kept_alone
    groups = tmp_path / "groups"
    flags = ("--grouping", "linked", "--groups", str(groups))
    linked = run(source, tmp_path / "linked.jsonl", *flags)
    assert [record["id"] for record in linked] == kept_linked
    others = [f"{source}:{line}" for line in (2, 3, 4)]
    assert json_lines(groups) == [{"kept": f"{source}:1", "dropped": others}]


def test_the_outputs_are_the_same_for_any_number_of_workers(tmp_path: Path) -> None:
    base = [words(40, seed) for seed in range(20)]
    texts = [" ".join(changed(base[n % 20], n // 20, n)) for n in range(120)]
    source = write_jsonl(tmp_path / "a.jsonl", texts)
    for workers in ("1", "2"):
        flags = ("--workers", workers, "--groups", str(tmp_path / f"groups{workers}"))
        assert len(run(source, tmp_path / f"out{workers}.jsonl", *flags)) < 120
    for name in ("out{}.jsonl", "out{}.jsonl.duplicates", "groups{}"):
        one, two = (tmp_path / name.format(workers) for workers in (1, 2))
        assert one.read_bytes() == two.read_bytes()


def test_groups_are_known_by_their_first() -> None:
    groups = DuplicateGroups()
    for _ in range(7):
        groups.add()
    for pair in ((5, 6), (2, 5), (0, 3), (6, 4)):
        groups.join(*pair)
    assert groups.dropped() == {0: [3], 2: [4, 5, 6]}
    assert groups.first(1) == 1


def test_a_full_disk_is_said_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", [" ".join(words(20, 1))] * 2)

    def full(*args: object, **kwargs: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("tempfile.TemporaryFile", full)
    with pytest.raises(MachineError, match="cannot write"):
        run(source, tmp_path / "out.jsonl")
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


def test_a_disk_that_fills_while_documents_are_kept_is_said(tmp_path: Path) -> None:
    class Full:
        def write(self, data: bytes) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        def close(self) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

    with Spool(tmp_path / "out.jsonl", "text") as spool:
        spool._file = Full()  # type: ignore[assignment]
        with pytest.raises(MachineError, match="cannot write"):
            spool.append(tmp_path / "a.jsonl", DocumentRow(1, b"{}"))


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (("--threshold", "0"), "a similarity is above 0"),
        (("--threshold", "nan"), "a similarity is above 0"),
        (("--num-hashes", "6"), "so few hashes"),
        (("--seed", "-1"), "a number of 32 bits"),
        (("--workers", "0"), "--workers is a positive number"),
        (("--groups", "out.jsonl"), "over another file"),
    ],
)
def test_what_cannot_be_done_is_refused_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...], problem: str
) -> None:
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / "a.jsonl", [" ".join(words(20, 1))])
    with pytest.raises(ConfigError, match=problem):
        deduplicate.main(["--input", "a.jsonl", "--output", "out.jsonl", *flags])
    assert not list(tmp_path.glob("out*"))
