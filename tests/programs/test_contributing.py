"""The examples of CONTRIBUTING.md do what they show: the page's code is run, and trains a model."""

import argparse
import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

from megatron.config import fields
from megatron.errors import ConfigError
from tests.architecture.source_tree import ROOT
from tests.support.ranks import run_on_ranks
from tests.support.tiny import FP64, Record, assert_close, tiny_run, train, whole, write_tiny_corpus
from tests.unit.preflight.plans import found, only, plan

NAMES = {"a flag", "a check before training", "a layer of the network", "a dataset kind", "a task"}
LAYOUTS = ((1, {}), (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}))


def examples_of(text: str) -> dict[str, str]:
    """The page's blocks of Python that are examples, by their names, in order."""
    blocks = re.findall(
        r"^```python\n# Example: ([^\n]+)\n(.*?)^```", text, re.MULTILINE | re.DOTALL
    )
    return dict(blocks)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A module of all examples."""
    examples = examples_of((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"))
    assert set(examples) == NAMES
    path = tmp_path_factory.mktemp("examples") / "contributing_examples.py"
    path.write_text("\n\n".join(examples.values()), encoding="utf-8")
    return path


def imported(file: Path) -> ModuleType:
    """The module at `file`."""
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_flag_is_read_and_refused(file: Path) -> None:
    group = imported(file).LoggingConfig
    parser = argparse.ArgumentParser()
    fields.add_flags(parser, "logging", group, [])
    words = ["--log-gradient-interval", "5"]
    assert fields.from_flags(group, vars(parser.parse_args(words))).log_gradient_interval == 5
    with pytest.raises(ConfigError, match="it is not positive") as raised:
        group(log_gradient_interval=0)
    assert raised.value.found == "--log-gradient-interval 0"


def test_the_check_finds_what_is_wrong_and_nothing_else(file: Path) -> None:
    check = imported(file).log_lines_appear
    only(found(check, plan(log_interval=4)), "--log-interval 4, --train-iters 3", "use --log")
    assert found(check, plan(log_interval=3)) == []


def train_examples(file: Path, corpus: str, flags: dict[str, object]) -> list[Record]:
    """GPT with the layer of the example, and the task of the example, both a few steps."""
    examples = imported(file)
    gpt = examples.gpt_task()
    scaled = examples.replace(gpt, layers=examples.scaled_gpt_layers)
    config = tiny_run(corpus, train_iters=3, micro_batch_size=2, **flags)
    return [train(config, task) for task in (gpt, scaled, examples.reversed_gpt_task())]


@pytest.mark.slow
def test_the_layer_the_dataset_and_the_task_train_alike_in_every_layout(
    file: Path, tmp_path: Path
) -> None:
    corpus = write_tiny_corpus(tmp_path)
    layouts = [run_on_ranks(ranks, train_examples, file, corpus, flags) for ranks, flags in LAYOUTS]
    (plain, scaled, reverse), *_ = layouts[0]
    # A scale of ones changes nothing at first, is trained, and has a name in checkpoints.
    assert_close(scaled.losses[:1], plain.losses[:1], FP64)
    assert scaled.losses[-1] != plain.losses[-1]
    weight = whole([scaled])["model/scale.weight"]
    assert weight.shape == (16,)
    assert (weight != 1).all()
    # The task reads the same windows from their end.
    backwards = [[row[::-1] for row in rows] for rows in plain.trained_on]
    assert reverse.trained_on == backwards
    for one_process, both in zip(layouts[0][0], zip(*layouts[1], strict=True), strict=True):
        assert_close(both[0].losses, one_process.losses, FP64)
        assert_close(both[0].grad_norms, one_process.grad_norms, FP64)
