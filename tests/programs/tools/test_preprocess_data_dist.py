"""Preprocessing on several ranks: the bytes of one process, and what failures and kills leave."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from megatron.data.corpus.paths import corpus_files
from megatron.errors import ConfigError, DataError, MachineError, MegatronError, PeerError
from tests.programs.tools.preprocessing.test_dataset_rows import (
    TABLE,
    save_dataset,
    write_lines,
)
from tests.support.checkpoints.small_disk import small_disk
from tests.support.launch import (
    Ended,
    Started,
    all_ended,
    each_rank,
    free_port,
    run_program,
    torchrun_words,
)
from tools import preprocess_data, preprocess_data_dist
from tools.preprocessing.encoding import Chunk, EncodedChunk, EncodeSettings, encode_chunk
from tools.preprocessing.resume import partial_folder

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = str(ROOT / "tools" / "preprocess_data_dist.py")
BYTES = ("--tokenizer-type", "ByteTokenizer", "--append-eod")
KEYS = ("--json-keys", "q", "a")
SOON_S = 30.0  # for ranks to end after one failed: they take 3 s to start and 3 s to notice it


def write_shards(folder: Path, count: int = 5, *, repeats: int = 1) -> Path:
    """Files of different lengths; one has only documents that are dropped."""
    folder.mkdir()
    for shard in range(count):
        texts = [f"{shard} {n}" if shard != 2 else "" for n in range(1 + 30 * (shard % 3))]
        rows = [json.dumps({"q": t * repeats, "a": t and f"answer to {t}"}) for t in texts]
        (folder / f"{shard}.jsonl").write_text("\n".join(rows) + "\n")
    return folder


def words(source: Path, prefix: Path, *flags: str) -> list[str]:
    return ["--input", str(source), "--output-prefix", str(prefix), *BYTES, *KEYS, *flags]


def outputs(prefix: Path, keys: tuple[str, ...] = ("q", "a")) -> list[bytes]:
    return [path.read_bytes() for key in keys for path in corpus_files(f"{prefix}_{key}_document")]


def on_ranks(flags: list[list[str]], cwd: Path) -> list[Ended]:
    """Start ranks one by one, as Slurm does: the end of one does not end another."""
    port = str(free_port())
    with ExitStack() as stack:
        started = [
            stack.enter_context(
                Started(
                    [sys.executable, PROGRAM, *own],
                    cwd=cwd,
                    environment={
                        "RANK": str(rank),
                        "WORLD_SIZE": str(len(flags)),
                        "MASTER_ADDR": "127.0.0.1",
                        "MASTER_PORT": port,
                    },
                )
            )
            for rank, own in enumerate(flags)
        ]
        return all_ended(started)


@pytest.mark.parametrize(
    ("ranks", "merge"), [(1, "serial"), (1, "distributed"), (2, "serial"), (3, "distributed")]
)
def test_ranks_write_the_bytes_of_one_program(tmp_path: Path, ranks: int, merge: str) -> None:
    # Several blocks of checksums, so that the ranks of a merge share one file.
    source = write_shards(tmp_path / "in", repeats=3000)
    preprocess_data.main(words(source, tmp_path / "one"))
    assert (tmp_path / "one_q_document.bin").stat().st_size > 4 * 2**18
    flags = words(source, tmp_path / "out" / "x", "--merge", merge)
    if ranks == 1:
        preprocess_data_dist.main(flags)
    else:
        ended = run_program(
            torchrun_words(ranks, PROGRAM, *flags), cwd=tmp_path, warm_children=True
        )
        assert ended.status == 0, ended.err
        assert f"--data-path {tmp_path / 'out' / 'x'}_q_document" in ended.out
    assert outputs(tmp_path / "out" / "x") == outputs(tmp_path / "one")
    assert len(list((tmp_path / "out").iterdir())) == 8  # nothing is left beside them


def test_rows_of_a_dataset_are_shared_by_ranks(tmp_path: Path) -> None:
    lines = write_lines(tmp_path / "rows.jsonl", TABLE)
    one = ["--input", str(lines), "--output-prefix", str(tmp_path / "one"), *BYTES]
    preprocess_data.main(one)
    saved = save_dataset(tmp_path / "saved", {"train": TABLE, "test": TABLE})
    flags = ["--hf-dataset", str(saved), "--output-prefix", str(tmp_path / "two"), *BYTES]
    ended = run_program(
        torchrun_words(2, PROGRAM, *flags, "--hf-split", "train"),
        cwd=tmp_path,
        warm_children=True,
    )
    assert ended.status == 0, ended.err
    assert outputs(tmp_path / "two", ("text",)) == outputs(tmp_path / "one", ("text",))


def test_a_rank_that_fails_ends_the_others_with_its_words_and_no_output_appears(
    tmp_path: Path,
) -> None:
    source = write_shards(tmp_path / "in")
    with (source / "4.jsonl").open("a") as file:
        file.write("no json\n")
    ended = on_ranks([words(source, tmp_path / "out")] * 2, tmp_path)
    statuses = [one.status for one in ended]
    assert sorted(statuses) == sorted([DataError.exit_code, PeerError.exit_code])
    failed = statuses.index(DataError.exit_code)
    other = ended[1 - failed]
    assert f"rank {failed} failed, so this rank ends too" in other.err
    assert f"{source / '4.jsonl'}:32" in other.err
    assert other.seconds < SOON_S
    assert [path.name for path in tmp_path.glob("out*")] == ["out.partial"]


def test_ranks_that_would_write_different_bytes_are_refused(tmp_path: Path) -> None:
    source = write_shards(tmp_path / "in")
    flags = [words(source, tmp_path / "out"), words(source, tmp_path / "out", "--split-sentences")]
    for one in on_ranks(flags, tmp_path):
        assert one.status in (ConfigError.exit_code, PeerError.exit_code)
        assert "rank 1 has another settings than rank 0" in one.err
    assert not list(tmp_path.glob("out*"))


def test_a_killed_run_goes_on_behind_its_pieces_with_any_number_of_ranks(tmp_path: Path) -> None:
    source = tmp_path / "in"
    source.mkdir()
    for shard in range(8):
        (source / f"{shard}.jsonl").write_text(f'{{"text": "{shard} 2 3 4"}}\n' * 12_000)
    null = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "9", "--input", str(source)]
    preprocess_data.main([*null, "--output-prefix", str(tmp_path / "one")])
    flags = [*null, "--output-prefix", str(tmp_path / "out")]
    folder = partial_folder(str(tmp_path / "out"))
    with each_rank(2, flags, cwds=[tmp_path], program=PROGRAM) as ranks:
        deadline = time.monotonic() + 60
        while not list(folder.glob("*.note.json")) and time.monotonic() < deadline:
            assert all(one.process.poll() is None for one in ranks), [one.text for one in ranks]
            time.sleep(0.01)
        for one in ranks:
            one.process.kill()
        assert [one.process.wait() for one in ranks] == [-signal.SIGKILL] * 2
    assert list(tmp_path.glob("out*")) == [folder]
    done = len(list(folder.glob("*.note.json")))
    assert 0 < done < 8
    ended = run_program(
        torchrun_words(3, PROGRAM, *flags, "--resume"), cwd=tmp_path, warm_children=True
    )
    assert ended.status == 0, ended.err
    assert f"going on behind {done} finished pieces" in ended.out
    assert outputs(tmp_path / "out", ("text",)) == outputs(tmp_path / "one", ("text",))
    assert not folder.exists()


class BrokenOffError(Exception):
    """What a run is broken off with."""


def encoded(monkeypatch: pytest.MonkeyPatch, *, fails_at: int | None = None) -> list[Chunk]:
    """The chunks that are encoded from now on; the one of number `fails_at` fails."""
    seen: list[Chunk] = []

    def encode(settings: EncodeSettings, chunk: Chunk) -> EncodedChunk:
        seen.append(chunk)
        if len(seen) == fails_at:
            raise BrokenOffError
        return encode_chunk(settings, chunk)

    monkeypatch.setattr(preprocess_data, "encode_chunk", encode)
    return seen


def broken_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], Path]:
    """Flags of a run that ended in the last of five files, and its folder of pieces."""
    source = write_shards(tmp_path / "in")
    flags = words(source, tmp_path / "out")
    monkeypatch.setattr(preprocess_data_dist, "_PIECES_PER_RANK", 20)
    encoded(monkeypatch, fails_at=9)
    with pytest.raises(BrokenOffError):
        preprocess_data_dist.main(flags)
    folder = partial_folder(str(tmp_path / "out"))
    assert len(list(folder.glob("*.note.json"))) == 4
    return flags, folder


def test_pieces_that_are_finished_are_not_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags, _ = broken_off(tmp_path, monkeypatch)
    seen = encoded(monkeypatch)
    preprocess_data_dist.main([*flags, "--resume"])
    assert {chunk.path.name for chunk in seen} == {"4.jsonl"}
    preprocess_data.main(words(tmp_path / "in", tmp_path / "one"))
    assert outputs(tmp_path / "out") == outputs(tmp_path / "one")


@pytest.mark.parametrize("damage", ["flip", "cut", "no sums", "no note"])
def test_pieces_that_are_not_as_written_are_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    flags, folder = broken_off(tmp_path, monkeypatch)
    (one,) = [path for path in folder.glob("*_1.bin") if path.read_bytes()[:1] == b"a"][1:2]
    if damage == "flip":
        one.write_bytes(b"b" + one.read_bytes()[1:])
    elif damage == "cut":
        os.truncate(one, 2)
    elif damage == "no sums":
        one.with_suffix(".sums").unlink()
    else:
        (folder / f"{one.name.partition('_')[0]}.note.json").unlink()
    seen = encoded(monkeypatch)
    preprocess_data_dist.main([*flags, "--resume"])
    assert len({chunk.path.name for chunk in seen} - {"4.jsonl"}) == 1
    preprocess_data.main(words(tmp_path / "in", tmp_path / "one"))
    assert outputs(tmp_path / "out") == outputs(tmp_path / "one")


def test_finished_pieces_are_neither_used_nor_removed_unasked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags, folder = broken_off(tmp_path, monkeypatch)
    monkeypatch.undo()
    with pytest.raises(ConfigError, match="finished parts of an earlier run are there") as caught:
        preprocess_data_dist.main(flags)
    assert "add --resume to keep them, or --overwrite" in str(caught.value)
    with pytest.raises(ConfigError, match="other input, tokenizer or flags"):
        preprocess_data_dist.main([*flags, "--split-sentences", "--resume"])
    note = next(folder.glob("*.note.json"))
    content = note.read_text()
    note.write_text("{")
    with pytest.raises(ConfigError, match="the note of a finished piece cannot be read"):
        preprocess_data_dist.main([*flags, "--resume"])
    note.write_text(content)
    plan = folder / "plan.json"
    plan.write_text('{"pieces": 3}')
    with pytest.raises(ConfigError, match="the journal of an earlier run cannot be read"):
        preprocess_data_dist.main([*flags, "--resume"])
    (folder / "journal.json").write_text("{}")
    with pytest.raises(ConfigError, match="are of a run of one process"):
        preprocess_data_dist.main([*flags, "--resume"])
    (folder / "journal.json").unlink()
    preprocess_data_dist.main([*flags, "--overwrite"])
    assert not folder.exists()


def test_several_workers_go_on_from_piece_to_piece(tmp_path: Path) -> None:
    source = write_shards(tmp_path / "in")
    preprocess_data.main(words(source, tmp_path / "one"))
    preprocess_data_dist.main(words(source, tmp_path / "out", "--workers", "2"))
    assert outputs(tmp_path / "out") == outputs(tmp_path / "one")


def test_nothing_to_write_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"q": "", "a": ""}\n')
    with pytest.raises(DataError, match="no document is left"):
        preprocess_data_dist.main(words(tmp_path / "a.jsonl", tmp_path / "out"))


def test_pieces_that_rank_0_does_not_see_are_a_file_system_that_is_not_shared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Blind(preprocess_data_dist.PieceJournal):
        def totals(self, number: int) -> Any:
            return None

    monkeypatch.setattr(preprocess_data_dist, "_VISIBLE_S", 0.1)
    monkeypatch.setattr(preprocess_data_dist, "PieceJournal", Blind)
    with pytest.raises(ConfigError, match="rank 0 does not see") as caught:
        preprocess_data_dist.main(words(write_shards(tmp_path / "in"), tmp_path / "out"))
    assert "all machines share" in str(caught.value)


def looks_finished(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.suffix in (".bin", ".idx", ".sums", ".json")]


@pytest.mark.parametrize("kib", [100, 850])
@pytest.mark.parametrize("merge", ["serial", "distributed"])
def test_a_full_disk_leaves_nothing_that_looks_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kib: int, merge: str
) -> None:
    """100 KiB are too few for the pieces, and 850 KiB for the pieces and the output."""
    source = write_shards(tmp_path / "in", repeats=1000)
    full = OSError(errno.ENOSPC, "No space left on device")

    def refuse() -> None:
        def pwrite(descriptor: int, data: object, at: int) -> int:
            raise full

        monkeypatch.setattr(os, "pwrite", pwrite)
        if kib == 100 or merge == "serial":
            monkeypatch.setattr("megatron.data.indexed_dataset.open", _opens_full, raising=False)

    with small_disk(tmp_path / "disk", kib=kib, otherwise=refuse) as disk:
        with pytest.raises(MegatronError) as caught:
            preprocess_data_dist.main(words(source, disk / "x", "--merge", merge))
        assert isinstance(caught.value, MachineError)
        assert "No space left" in str(caught.value) or "no room" in str(caught.value)
        assert looks_finished(disk) == []


def _opens_full(path: Any, mode: str = "r", **more: Any) -> Any:
    if "w" in mode:
        raise OSError(errno.ENOSPC, "No space left on device")
    return open(path, mode, **more)


def test_a_file_that_may_not_grow_is_an_error_of_the_machine(tmp_path: Path) -> None:
    source = write_shards(tmp_path / "in", repeats=1000)
    flags = words(source, tmp_path / "out" / "x")
    command = f"ulimit -f 300; exec {sys.executable} {PROGRAM} $*"  # KiB: pieces fit, not all
    done = subprocess.run(
        ["bash", "-c", command, "-", *flags], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == MachineError.exit_code, done.stderr
    assert "cannot write" in done.stderr
    assert looks_finished(tmp_path / "out") == []
