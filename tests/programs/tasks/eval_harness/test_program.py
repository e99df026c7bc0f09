"""A task from local files through the whole harness, offline; and wrong flags."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from megatron.errors import ConfigError
from tasks.eval_harness.program import main
from tests.support.ranks import run_on_ranks

TASK = """\
task: tiny_choice
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
doc_to_choice: "{{{{choices}}}}"
metric_list:
  - metric: acc
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("harness")
    rows = [
        {"question": "the cat sat on a", "choices": ["mat", "dog"], "answer": at % 2}
        for at in range(5)
    ]
    data = made / "rows.jsonl"
    data.write_text("\n".join(map(json.dumps, rows)) + "\n")
    (made / "tasks").mkdir()
    (made / "tasks" / "tiny.yaml").write_text(TASK.format(data=data))
    return made


def evaluate(argv: Sequence[str]) -> str:
    try:
        main("LM-EVAL", argv)
    except ConfigError as error:
        return str(error)
    return ""


def words_of(tiny_gpt: str, folder: Path, *more: object) -> list[str]:
    flags = ["--load", tiny_gpt, "--include-path", folder / "tasks", "--only-included"]
    return [str(word) for word in [*flags, *more]]


@pytest.mark.slow
def test_a_task_of_local_files_is_evaluated_on_two_ranks_as_on_one(
    tiny_gpt: str, folder: Path, tmp_path: Path
) -> None:
    found = []
    for ranks, grid in ((1, []), (2, ["--tensor-model-parallel-size", 2])):
        output = tmp_path / f"{ranks}.json"
        words = words_of(tiny_gpt, folder, "--tasks", "tiny_choice", "--output", output, *grid)
        assert set(run_on_ranks(ranks, evaluate, words)) == {""}
        found.append(json.loads(output.read_text())["results"]["tiny_choice"]["acc,none"])
    assert found[0] == found[1]
    # The same question five times, with one answer and the other by turns.
    assert found[0] in (2 / 5, 3 / 5)


def test_a_task_that_is_not_there_is_refused(tiny_gpt: str, folder: Path) -> None:
    (said,) = run_on_ranks(1, evaluate, words_of(tiny_gpt, folder, "--tasks", "tiny_chice"))
    assert "the harness has no such task" in said
    assert "did you mean tiny_choice?" in said
    assert "--include-path" in said
