"""Data that goes wrong under a run of two ranks: both end, and name the file and the error."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron.errors import DataError, PeerError
from tests.support.launch import (
    Ended,
    all_ended,
    byte_corpus,
    each_rank,
    pretrain_words,
    run_program,
    small_run,
)

ENDS_WITHIN_S = 60.0
FOREVER = (
    *("--train-iters", "1000000", "--eval-iters", "0", "--log-interval", "1000000"),
    *("--check-agreement-interval", "5"),
)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A corpus of 300 documents and 40 000 bytes, not to be written to."""
    return byte_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture
def prefix(original: str, tmp_path: Path) -> str:
    """A copy of it, to damage."""
    return copied(original, tmp_path)


def copied(prefix: str, folder: Path) -> str:
    folder.mkdir(exist_ok=True)
    for path in Path(prefix).parent.glob(f"{Path(prefix).name}.*"):
        shutil.copy(path, folder)
    return str(folder / Path(prefix).name)


def replaced(prefix: str) -> None:
    """Another file of the same length appears under the name, as a tool that renames leaves it."""
    path = Path(prefix + ".bin")
    new = path.with_suffix(".new")
    new.write_bytes(path.read_bytes()[::-1])
    os.replace(new, path)


def appended_to(prefix: str) -> None:
    with open(prefix + ".bin", "ab") as file:
        file.write(b"more")


def index_replaced(prefix: str) -> None:
    path = Path(prefix + ".idx")
    new = path.with_suffix(".new")
    shutil.copy(path, new)
    os.replace(new, path)


@pytest.mark.parametrize(
    ("change", "suffix"), [(replaced, ".bin"), (appended_to, ".bin"), (index_replaced, ".idx")]
)
def test_a_file_that_changes_during_a_run_ends_all_ranks(
    change: Callable[[str], None], suffix: str, prefix: str, tmp_path: Path
) -> None:
    with each_rank(2, small_run(prefix, *FOREVER), cwds=[tmp_path]) as ranks:
        ranks[0].wait_for("to go")
        change(prefix)
        ended = all_ended(ranks, within_s=ENDS_WITHIN_S)
    assert {one.status for one in ended} <= {DataError.exit_code, PeerError.exit_code}
    assert DataError.exit_code in {one.status for one in ended}
    for one in ended:
        assert f"the corpus changed while it was in use: {prefix}{suffix}" in one.text, one.text


def test_a_file_that_changed_is_noticed_before_a_checkpoint_says_it_was_trained_on(
    prefix: str, tmp_path: Path
) -> None:
    flags = small_run(prefix, *FOREVER, "--save", "save", "--check-agreement-interval", "0")
    with each_rank(1, [*flags, "--save-interval", "100"], cwds=[tmp_path]) as ranks:
        ranks[0].wait_for("to go")
        appended_to(prefix)
        (ended,) = all_ended(ranks, within_s=ENDS_WITHIN_S)
    assert ended.status == DataError.exit_code, ended.text
    assert f"the corpus changed while it was in use: {prefix}.bin" in ended.text
    assert not list(tmp_path.glob("save/iter_*"))


def test_what_a_worker_found_is_said_on_every_rank_with_its_traceback(
    prefix: str, tmp_path: Path
) -> None:
    path = Path(prefix + ".bin")
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= 1
    path.write_bytes(content)
    with each_rank(2, small_run(prefix, *FOREVER, "--num-workers", "1"), cwds=[tmp_path]) as ranks:
        ended = all_ended(ranks, within_s=ENDS_WITHIN_S)
    assert_both_say(ended, DataError.exit_code, f"not those that were written: {prefix}.bin")


def test_a_bug_of_a_worker_is_said_on_every_rank_with_its_traceback(
    prefix: str, tmp_path: Path
) -> None:
    program = tmp_path / "broken.py"
    program.write_text(
        "import megatron.data.gpt_dataset as gpt\n"
        "from pretrain_gpt import program\n"
        "def read(self, index):\n"
        "    raise ZeroDivisionError('no such sample')\n"
        "gpt.GPTDataset.__getitem__ = read\n"
        "program()\n"
    )
    flags = small_run(prefix, *FOREVER, "--num-workers", "1")
    with each_rank(2, flags, cwds=[tmp_path], program=str(program)) as ranks:
        ended = all_ended(ranks, within_s=ENDS_WITHIN_S)
    assert_both_say(ended, 1, "ZeroDivisionError: no such sample")


def assert_both_say(ended: list[Ended], status: int, words: str) -> None:
    """Each rank failed, by itself or for the other's sake, with the error and its traceback."""
    assert {one.status for one in ended} <= {status, PeerError.exit_code}
    assert status in {one.status for one in ended}
    for one in ended:
        for text in (words, "Traceback (most recent call last)", "__getitem", "worker"):
            assert text in one.text, one.text


def test_ranks_with_other_files_of_weighted_paths_do_not_start(
    original: str, tmp_path: Path
) -> None:
    nodes = [tmp_path / "node0", tmp_path / "node1"]
    for node, share in zip(nodes, ("1", "0.5")):
        copied(original, node)
        (node / "paths").write_text(f'"T: 1 0:{share} {Path(original).name}"\n')
    flags = weighted(*FOREVER)
    with each_rank(2, flags, cwds=nodes) as ranks:
        ended = all_ended(ranks, within_s=ENDS_WITHIN_S)
    for one in ended:
        assert "the ranks do not see the same data" in one.text, one.text
        assert "0:1 " in one.text
        assert "0:0.5 " in one.text


def test_a_run_resumed_with_another_content_of_its_files_is_told(
    original: str, tmp_path: Path
) -> None:
    """And so is a user whose index may be of another corpus, where no checksums know."""
    copied(original, tmp_path)
    name = Path(original).name
    (tmp_path / f"{name}.sums").unlink()
    os.utime(tmp_path / f"{name}.idx", ns=(1, 1))
    (tmp_path / "paths").write_text(f'"T: 1 0:1 {name}"\n')
    flags = weighted("--eval-iters", "0", "--save", "save", "--load", "save")
    first = run_program(pretrain_words(*flags, "--train-iters", "2"), cwd=tmp_path)
    assert first.status == 0, first.text
    assert f"{name}.idx is older than {name}.bin" in first.text
    (tmp_path / "paths").write_text(f'"T: 1 0:0.5 {name}"\n')
    resumed = run_program(pretrain_words(*flags, "--train-iters", "4"), cwd=tmp_path)
    assert resumed.status == 0, resumed.text
    assert (
        "resuming with files of the data that are not those the checkpoint was trained on, so "
        "that samples may be repeated or left out: --train-weighted-split-paths-path paths: "
        f'"T: 1 0:1 {name}" -> "T: 1 0:0.5 {name}"'
    ) in resumed.text
    again = run_program(pretrain_words(*flags, "--train-iters", "6"), cwd=tmp_path)
    assert again.status == 0, again.text
    assert "files of the data" not in again.text


def weighted(*flags: str) -> list[str]:
    words = small_run("none", "--train-weighted-split-paths-path", "paths", *flags)
    at = words.index("--data-path")
    return [*words[:at], *words[at + 2 :]]
