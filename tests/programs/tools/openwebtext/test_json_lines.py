"""What all tools for web text have in common: refusals, how they start, packages that may miss."""

import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from megatron.errors import ConfigError, DataError
from tests.support.documents import words, write_jsonl
from tools.openwebtext import (
    add_id,
    blacklist_urls,
    cleaning,
    cleanup_dataset,
    decontaminate,
    deduplicate,
    merge_jsons,
)

ROOT = Path(__file__).resolve().parents[4]
PROGRAMS: list[tuple[ModuleType, tuple[str, ...]]] = [
    (add_id, ("--prefix", "web")),
    (cleanup_dataset, ()),
    (decontaminate, ("--tasks", "tasks.jsonl")),
    (deduplicate, ()),
    (merge_jsons, ()),
]


@pytest.mark.parametrize(("program", "needed"), PROGRAMS)
@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (("--input", "a.txt"), "documents are read from JSON lines"),
        (("--input", "empty.jsonl"), "the input holds no document"),
        (("--output", "there.jsonl"), "the output exists"),
        (("--output", "sub/../a.jsonl", "--overwrite"), "over another file of this run"),
        (("--input", "bad.jsonl"), "the line is not valid JSON"),
    ],
)
def test_what_cannot_be_done_is_refused_and_writes_nothing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    program: ModuleType,
    needed: tuple[str, ...],
    flags: tuple[str, ...],
    problem: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sub").mkdir()
    write_jsonl(tmp_path / "a.jsonl", [" ".join(words(200, 1))])
    write_jsonl(tmp_path / "tasks.jsonl", [" ".join(words(20, 2))])
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "there.jsonl").write_text("there")
    (tmp_path / "bad.jsonl").write_text("{\n")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises((ConfigError, DataError), match=problem):
        program.main(["--input", "a.jsonl", "--output", "out.jsonl", *needed, *flags])
    assert sorted(tmp_path.rglob("*")) == before
    assert (tmp_path / "there.jsonl").read_text() == "there"


@pytest.mark.parametrize(
    ("package", "program", "flags", "advice"),
    [
        ("datasketch", deduplicate, (), "pip install 'datasketch>=2.0'"),
        ("ftfy", cleanup_dataset, (), "pip install ftfy, or add --no-unicode-repair"),
        (
            "py3langid.langid",
            cleanup_dataset,
            ("--no-unicode-repair",),
            "pip install 'py3langid>=0.4', or add --language any",
        ),
    ],
)
def test_a_package_that_is_missing_is_named(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    package: str,
    program: ModuleType,
    flags: tuple[str, ...],
    advice: str,
) -> None:
    for cached in (cleaning._ftfy, cleaning._identifier):
        cached.cache_clear()
    monkeypatch.setitem(sys.modules, package, None)
    source = write_jsonl(tmp_path / "a.jsonl", ["text"])
    with pytest.raises(ConfigError, match="which is not installed") as raised:
        program.main(["--input", str(source), "--output", str(tmp_path / "out.jsonl"), *flags])
    assert advice in raised.value.fix
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


@pytest.mark.parametrize("program", [*(program for program, _ in PROGRAMS), blacklist_urls])
def test_the_programs_start_from_any_folder(tmp_path: Path, program: ModuleType) -> None:
    name = program.__name__.rpartition(".")[2]
    command = [sys.executable, str(ROOT / "tools" / "openwebtext" / f"{name}.py"), "--help"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert f"usage: {name}.py" in done.stdout
    assert "--overwrite" in done.stdout
