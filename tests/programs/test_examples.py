"""Every script in examples/ runs as it is written, at a size that takes seconds."""

import os
import re
from pathlib import Path

import pytest

from megatron.checkpoint.folder import TRACKER
from tests.support.launch import ROOT, Ended, run_program, write_text

EXAMPLES = ROOT / "examples"
SCRIPTS = sorted(path.name for path in EXAMPLES.glob("*.sh"))
TINY = (
    "--num-layers 1 --hidden-size 32 --seq-length 80 --micro-batch-size 2 --global-batch-size 8 "
    "--eval-iters 1 --log-interval 1"
)

pytestmark = pytest.mark.slow  # each starts torchrun once or twice


def run_example(name: str, work: Path, **variables: str) -> Ended:
    """Run it from another folder, with everything that it makes in `work`."""
    environment = {"WORK": str(work), "ITERS": "2"} | variables
    ended = run_program(
        [str(EXAMPLES / name), *TINY.split()], cwd=work, environment=environment, within_s=180
    )
    assert ended.status == 0, ended.text
    return ended


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the first example makes of a text: data and tokenizer for the others."""
    folder = tmp_path_factory.mktemp("work")
    text = write_text(folder / "mine.txt", 1500)
    ended = run_example("pretrain_gpt_cpu.sh", folder, DATA=str(text))
    assert "tp 1 x pp 1 x dp 2" in ended.out
    assert (folder / "cpu" / TRACKER).read_text() == "2\n"
    return folder


def test_the_first_example_goes_on_where_it_was(work: Path) -> None:
    ended = run_example("pretrain_gpt_cpu.sh", work, DATA=str(work / "mine.txt"), ITERS="3")
    assert "loaded checkpoint" in ended.out
    assert "wrote" not in ended.out  # corpus and tokenizer are there
    assert (work / "cpu" / TRACKER).read_text() == "3\n"


@pytest.mark.parametrize(
    ("name", "folder", "layout"),
    [
        ("pretrain_gpt_tp.sh", "tp", "tp 2 x pp 1 x dp 1"),
        ("pretrain_gpt_dp.sh", "dp", "tp 1 x pp 1 x dp 2"),
        ("pretrain_llama_style.sh", "llama", "tp 1 x pp 1 x dp 2"),
        ("pretrain_fim.sh", "fim", "tp 1 x pp 1 x dp 2"),
        ("finetune_chat.sh", "chat", "tp 1 x pp 1 x dp 2"),
    ],
)
def test_an_example_trains_and_saves(name: str, folder: str, layout: str, work: Path) -> None:
    ended = run_example(name, work)
    assert layout in ended.out
    assert "validation loss at iteration 2" in ended.out
    assert (work / folder / TRACKER).read_text() == "2\n"


def test_the_example_of_resuming_stops_goes_on_and_writes(work: Path) -> None:
    ended = run_example("resume_and_generate.sh", work, PROMPT="the cat")
    order = ["exiting program at iteration 1", "iter_0000001 at iteration 1", "complete", "verif"]
    places = [ended.out.index(words) for words in [*order, "\nthe cat"]]
    assert places == sorted(places)


def test_the_readme_lists_every_example_with_its_variables() -> None:
    rows = {
        match[1]: match[2]
        for match in re.finditer(
            r"^\| \[(\w+\.sh)\]\(\1\) \| .* \| (.*) \|$", (EXAMPLES / "README.md").read_text(), re.M
        )
    }
    assert sorted(rows) == SCRIPTS
    for name, said in rows.items():
        script = (EXAMPLES / name).read_text()
        variables = set(re.findall(r"^([A-Z_]+)=\$\{", script, re.M)) - {"PYTHON"}
        assert set(re.findall(r"`([A-Z_]+)`", said)) == variables, name
        assert os.access(EXAMPLES / name, os.X_OK), f"{name} cannot be executed"
