"""generate_text.py continues prompts with a trained checkpoint, on any number of ranks alike."""

import json
import re
import sys
from pathlib import Path

import pytest

from megatron.errors import CheckpointError, ConfigError, DataError, MachineError
from tests.support.launch import (
    PRETRAIN,
    ROOT,
    byte_corpus,
    run_program,
    small_run,
    torchrun_words,
)
from tools.generate_text import _write, main

GENERATE = str(ROOT / "tools" / "generate_text.py")
GREEDY = ("--prompt", "the cat ", "--prompt", "a dog", "--num-tokens", "8", "--greedy", "--json")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two tensor-parallel ranks in float64, in which no two tokens are a tie."""
    folder = tmp_path_factory.mktemp("trained")
    flags = ["--tensor-model-parallel-size", "2", "--fp64", "--train-iters", "10"]
    flags += ["--save", "save", "--eval-iters", "0", "--log-interval", "100"]
    words = torchrun_words(2, PRETRAIN, *small_run(byte_corpus(folder), *flags))
    done = run_program(words, cwd=folder, warm_children=True)
    assert done.status == 0, done.text
    return folder / "save"


@pytest.mark.slow
@pytest.mark.parametrize(("axis", "regex"), [("tensor", ".*"), ("pipeline", "[xyz]{2,5}")])
def test_one_rank_and_two_continue_prompts_alike(
    axis: str, regex: str, checkpoint: Path, tmp_path: Path
) -> None:
    flags = ["--load", str(checkpoint), *GREEDY]
    flags += ["--regex", regex] if axis == "pipeline" else []
    output = tmp_path / "samples"
    one = run_program([sys.executable, GENERATE, *flags, "--output", str(output)], cwd=tmp_path)
    assert one.status == 0, one.text
    assert output.read_text().splitlines() == [row for row in one.out.splitlines() if "{" in row]
    split = [f"--{axis}-model-parallel-size", "2"]
    two = run_program(torchrun_words(2, GENERATE, *flags, *split), cwd=tmp_path, warm_children=True)
    assert two.status == 0, two.text
    rows = [json.loads(line) for line in one.out.splitlines() if line.startswith("{")]
    assert rows == [json.loads(line) for line in two.out.splitlines() if line.startswith("{")]
    assert [row["prompt"] for row in rows] == ["the cat ", "a dog"]
    assert all(1 <= len(row["tokens"]) <= 8 for row in rows)
    assert all(re.fullmatch(regex, row["text"], re.DOTALL) for row in rows)
    assert all(bytes(t for t in row["tokens"] if t < 256).decode() == row["text"] for row in rows)


@pytest.mark.slow
def test_a_model_whose_layers_are_on_the_disk_writes_the_same_text(
    checkpoint: Path, tmp_path: Path
) -> None:
    flags = ["--load", str(checkpoint), *GREEDY]
    whole = run_program([sys.executable, GENERATE, *flags], cwd=tmp_path)
    memory = ["--device-map", "auto", "--offload-folder", "offload", "--max-memory"]
    words = [sys.executable, GENERATE, *flags, *memory]
    small = run_program([*words, "cpu=1KiB"], cwd=tmp_path)
    assert small.status == MachineError.exit_code
    assert "the model does not fit into the memory that may be used" in small.err
    assert not (tmp_path / "offload").exists()
    least = re.search(r"fix: cpu needs (\S+) at least", small.err)
    assert least is not None
    placed = run_program([*words, f"cpu={least[1]}"], cwd=tmp_path)
    assert placed.status == 0, placed.text
    rows = [line for line in placed.out.splitlines() if line.startswith("{")]
    assert rows == [line for line in whole.out.splitlines() if line.startswith("{")]
    assert "computed on cpu" in placed.text
    assert "disk: " in placed.text
    assert list((tmp_path / "offload").glob("layers.*.safetensors"))


def test_a_missing_checkpoint_ends_the_program(tmp_path: Path) -> None:
    words = [sys.executable, GENERATE, "--load", "nowhere", "--prompt", "a"]
    ended = run_program(words, cwd=tmp_path)
    assert ended.status == CheckpointError.exit_code
    assert "does not exist\n  found: nowhere\n  fix: check the path after --load" in ended.err
    assert "Traceback" not in ended.err


def test_an_output_that_cannot_be_written_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(MachineError, match="cannot write") as caught:
        _write(tmp_path / "none" / "samples", "text")
    assert str(tmp_path / "none") in str(caught.value)


def test_prompts_come_from_exactly_one_place(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="prompts must come from exactly one place"):
        main(["--load", str(tmp_path)])


def test_counts_are_positive(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a count is not positive") as caught:
        main(["--load", str(tmp_path), "--prompt", "a", "--num-samples", "0"])
    assert caught.value.found == "--num-samples 0"


def test_a_file_of_prompts_is_there_and_has_some(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="the file of prompts is not there"):
        main(["--load", str(tmp_path), "--prompt-file", str(tmp_path / "none.txt")])
    (tmp_path / "empty.txt").write_text("\n \n")
    with pytest.raises(DataError, match="the file of prompts has none"):
        main(["--load", str(tmp_path), "--prompt-file", str(tmp_path / "empty.txt")])
