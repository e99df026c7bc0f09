"""A format is one record: with it in the list, all that works with formats works with it.

Nothing but `registry.FORMATS` is changed here.
"""

import re
import sys
from pathlib import Path

import pytest

from megatron.checkpoint import rng
from megatron.checkpoint.formats import registry
from megatron.checkpoint.formats.native.format import FORMAT as NATIVE
from megatron.checkpoint.load.stored_run import stored_run
from megatron.config.checkpoint import CheckpointFormatName
from megatron.errors import CheckpointError
from tests.architecture.source_tree import ROOT
from tests.support.checkpoints import toy_format
from tests.support.checkpoints.sources import assert_same
from tests.support.checkpoints.toy_format import TOY
from tests.unit.test_checkpointing import AT, equal, run_of
from tools import convert_checkpoint, inspect_checkpoint


@pytest.fixture
def listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "FORMATS", (*registry.FORMATS, TOY))


@pytest.fixture
def ours(tmp_path: Path) -> Path:
    """A checkpoint of iteration 3 that a run of ours has saved."""
    run = run_of(save=str(tmp_path / "ours"))
    run.step()
    run.save()
    return tmp_path / "ours"


def convert(monkeypatch: pytest.MonkeyPatch, load: Path, save: Path, form: str) -> None:
    flags = ["--load", str(load), "--save", str(save), "--format", form]
    monkeypatch.setattr(sys, "argv", ["convert_checkpoint.py", *flags])
    convert_checkpoint.main()


@pytest.mark.usefixtures("listed")
def test_a_listed_format_is_converted_to_recognised_loaded_and_converted_back(
    ours: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    toy, back = tmp_path / "toy", tmp_path / "back"
    convert(monkeypatch, ours, toy, "toy")
    assert [path.name for path in (toy / "iter_0000003").iterdir()] == [toy_format.FILE]
    assert registry.format_of(toy) is TOY
    assert registry.format_of(toy / "iter_0000003") is TOY
    assert stored_run(toy).config == stored_run(ours).config
    monkeypatch.setattr(sys, "argv", ["inspect_checkpoint.py", str(toy)])
    inspect_checkpoint.main()
    assert "format: toy, as it would be loaded" in capsys.readouterr().out

    first, second = run_of(load=str(ours)), run_of(load=str(toy))
    assert first.load() == second.load() == AT
    assert f"{toy / 'iter_0000003'} is a checkpoint of format toy" in capsys.readouterr().out
    assert equal(second.weights(), first.weights())
    assert second.engine.state(optimizer=True).scalars == first.engine.state(optimizer=True).scalars
    states = rng.capture()
    expected = first.step()
    rng.restore(states)  # which the toy format does not hold
    assert second.step() == expected
    assert equal(second.weights(), first.weights())

    convert(monkeypatch, toy, back, "sharded")
    assert registry.format_of(back) is NATIVE
    with registry.open_source(ours) as one, registry.open_source(back) as other:
        assert_same(other, one)
        assert (other.config, other.progress) == (one.config, one.progress)


def test_what_is_not_listed_is_no_checkpoint(
    ours: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(registry, "FORMATS", (*registry.FORMATS, TOY))
        convert(monkeypatch, ours, tmp_path / "toy", "toy")
    with pytest.raises(CheckpointError, match="no checkpoint that this program reads") as caught:
        registry.open_source(tmp_path / "toy")
    assert "toy" not in caught.value.fix
    with pytest.raises(CheckpointError, match="no such checkpoint format"):
        convert(monkeypatch, ours, tmp_path / "again", "toy")


def test_the_flag_names_the_formats_that_runs_save() -> None:
    saved = {form.name for form in registry.FORMATS if form.save_run is not None}
    assert saved == {name.value for name in CheckpointFormatName}
    assert [form for form in registry.FORMATS if form.is_native] == [NATIVE]
    assert [form.name for form in registry.FORMATS if form.saves_in_background] == ["sharded"]


def test_the_example_of_contributing_is_what_is_tried_here() -> None:
    section = (ROOT / "CONTRIBUTING.md").read_text().split("**a checkpoint format.**")[1]
    (example, *_) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    tried = Path(toy_format.__file__).read_text()
    pieces = [piece.removesuffix(" ...").strip("\n") for piece in re.split(r"\n\n+", example)]
    assert len(pieces) == 5
    for piece in pieces:
        assert piece in tried, piece


def test_the_table_of_the_documentation_is_that_of_the_records() -> None:
    text = (ROOT / "docs" / "checkpoints.md").read_text()
    _, table = text.split("| | read | written by tools | saved by runs | optimizer state |")
    found = {}
    for line in table.split("\n\n")[0].splitlines()[2:]:
        name, _, by_tools, by_runs, optimizer, *_ = line.strip("| ").split(" | ")
        found[name.split("`")[1]] = (
            by_tools != "no",
            by_runs != "no",
            "--async-save" in by_runs,
            "object stores" in by_runs,
            optimizer != "no",
        )
    assert found == {
        form.name: (
            form.write is not None,
            form.save_run is not None,
            form.saves_in_background,
            form.is_native,
            form.has_optimizer,
        )
        for form in registry.FORMATS
    }
