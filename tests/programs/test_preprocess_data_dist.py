"""Preprocessing on several ranks: the bytes of one rank, and what happens when one fails."""

import json
import os
import sys
from pathlib import Path

import pytest

from megatron.data.corpus_paths import corpus_files
from megatron.errors import ConfigError, DataError, PeerError
from megatron.preflight.environment import Launch
from tests.support.launch import Ended, Started, _free_port, all_ended, run_program, torchrun_words
from tools import preprocess_data, preprocess_data_dist
from tools.preprocess_data_dist import stretch

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = str(ROOT / "tools" / "preprocess_data_dist.py")
FLAGS = ("--tokenizer-type", "ByteTokenizer", "--append-eod", "--json-keys", "q", "a")


def write_shards(folder: Path, count: int = 5) -> Path:
    """Files of different lengths; one has only documents that are dropped."""
    folder.mkdir()
    for shard in range(count):
        texts = [f"{shard} {n}" if shard != 2 else "" for n in range(1 + 30 * (shard % 3))]
        rows = [json.dumps({"q": text, "a": text and f"answer to {text}"}) for text in texts]
        (folder / f"{shard}.jsonl").write_text("\n".join(rows) + "\n")
    return folder


def words(source: Path, prefix: Path) -> list[str]:
    return ["--input", str(source), "--output-prefix", str(prefix), *FLAGS]


def outputs(prefix: Path) -> list[bytes]:
    return [
        path.read_bytes() for key in ("q", "a") for path in corpus_files(f"{prefix}_{key}_document")
    ]


def on_ranks(ranks: int, flags: list[str], cwd: Path) -> list[Ended]:
    """Start ranks one by one, as Slurm does: nobody ends one for another."""
    port = str(_free_port())
    started = []
    for rank in range(ranks):
        environment = {
            "RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }
        one = Started([sys.executable, PROGRAM, *flags], cwd=cwd, environment=environment)
        started.append(one.__enter__())
    try:
        return all_ended(started)
    finally:
        for one in started:
            one.__exit__(None, None, None)


def test_ranks_of_torchrun_write_the_bytes_of_one_program(tmp_path: Path) -> None:
    source = write_shards(tmp_path / "in")
    preprocess_data.main(words(source, tmp_path / "one"))
    flags = words(source, tmp_path / "out" / "three")
    ended = run_program(torchrun_words(3, PROGRAM, *flags), cwd=tmp_path)
    assert ended.status == 0, ended.err
    assert f"--data-path {tmp_path / 'out' / 'three'}_q_document" in ended.out
    assert outputs(tmp_path / "out" / "three") == outputs(tmp_path / "one")
    assert not (tmp_path / "out" / "three.partial").exists()


def test_a_rank_that_fails_is_named_by_rank_0_and_no_output_appears(tmp_path: Path) -> None:
    source = write_shards(tmp_path / "in")
    with (source / "4.jsonl").open("a") as file:
        file.write("no json\n")
    first, second = on_ranks(2, words(source, tmp_path / "out"), tmp_path)
    assert second.status == DataError.exit_code
    assert first.status == PeerError.exit_code
    assert "rank 1 could not write its part" in first.err
    assert f"{source / '4.jsonl'}:32" in first.err
    assert [path.name for path in tmp_path.glob("out*")] == ["out.partial"]


def test_every_file_has_one_rank_and_the_order_stays(tmp_path: Path) -> None:
    sizes = [5, 0, 100, 7, 7, 300, 1, 0, 50]
    files = [tmp_path / str(number) for number in range(len(sizes))]
    for path, size in zip(files, sizes):
        path.write_bytes(b"x" * size)
    for ranks in (1, 2, 3, 20):
        parts = [stretch(files, Launch(rank, ranks)) for rank in range(ranks)]
        assert [path for part in parts for path in part] == files
    even = files[:1] * 8
    assert [len(stretch(even, Launch(rank, 4))) for rank in range(4)] == [2, 2, 2, 2]


def test_what_several_ranks_cannot_do_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = words(write_shards(tmp_path / "in"), tmp_path / "out")
    with pytest.raises(ConfigError, match="cannot be resumed"):
        preprocess_data_dist.main([*flags, "--resume"])
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delitem(os.environ, name, raising=False)
    with pytest.raises(ConfigError, match="there is only one rank"):
        preprocess_data_dist.main(flags)


class Silent:
    """A store that no rank speaks to."""

    def check(self, keys: list[str]) -> bool:
        return False


def test_a_rank_that_is_silent_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preprocess_data_dist, "_SILENCE_S", 0.0)
    with pytest.raises(PeerError, match="rank 3 was not heard of"):
        preprocess_data_dist._outcome(Silent(), 3)  # type: ignore[arg-type]


def test_parts_that_rank_0_does_not_see_are_a_file_system_that_is_not_shared(
    tmp_path: Path,
) -> None:
    with pytest.raises(ConfigError, match="rank 0 does not see") as caught:
        preprocess_data_dist._require_visible([[str(tmp_path / "rank00001_0")]])
    assert "all machines share" in str(caught.value)
