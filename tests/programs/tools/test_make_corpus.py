"""A corpus from Python's own sources: what is in it, and that it is the same each time."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.errors import ConfigError, DataError
from tools.make_corpus import Document, choose, library_documents, main, module_documents
from tools.preprocessing.documents import find_inputs

ROOT = Path(__file__).resolve().parents[3]
MODULE = f'''"""What this module is for{" and more" * 30}."""
import os


@decorated
def first():
    """What the function does{" and more" * 30}."""
    return {" + ".join(["os.name"] * 600)}


def second():
    return {" + ".join(["1"] * 300)}
'''


def test_prose_and_code_of_a_module_are_separate() -> None:
    prose, *code = module_documents("m.py", MODULE)
    assert prose.kind == "prose"
    assert prose.text.startswith("What this module is for")
    assert "first: What the function does" in prose.text
    assert "os.name" not in prose.text
    assert [document.kind for document in code] == ["code", "code"]
    assert code[0].text.startswith("import os\n\n\n@decorated\ndef first():")
    assert code[1].text.startswith("def second()")
    assert not any("and more" in document.text for document in code)


def test_a_module_that_does_not_parse_gives_nothing() -> None:
    assert list(module_documents("m.py", "def :")) == []


def test_machine_made_and_installed_modules_are_left_out(tmp_path: Path) -> None:
    for name in ("good.py", "test/x.py", "site-packages/x.py", "_sysconfigdata_x.py", "a/b.py"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(MODULE)
    sources = list(dict.fromkeys(document.source for document in library_documents(tmp_path)))
    assert sources == ["a/b.py", "good.py"]


def test_a_python_without_sources_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no sources of its standard library"):
        list(library_documents(tmp_path))


def test_the_order_depends_on_the_seed_alone_and_the_size_is_kept() -> None:
    documents = [Document(str(n), "code", "x" * 100) for n in range(50)]
    chosen = choose(documents, limit_bytes=1000, seed=1)
    assert len(chosen) == 10
    assert chosen == choose(documents, limit_bytes=1000, seed=1)
    assert chosen != choose(documents, limit_bytes=1000, seed=2)
    assert choose(documents, limit_bytes=2000, seed=1)[:10] == chosen


@pytest.mark.wide  # it reads all packages twice; the first run makes a corpus too
def test_the_program_prints_only_the_path_and_writes_the_same_corpus_twice(tmp_path: Path) -> None:
    for name in ("a", "b"):
        command = [sys.executable, str(ROOT / "tools" / "make_corpus.py"), "--max-mb", "0.3"]
        command += ["--output", f"{name}.jsonl"]
        done = subprocess.run(
            command, cwd=tmp_path, check=True, capture_output=True, text=True, timeout=120
        )
        assert done.stdout == f"{name}.jsonl\n"
    assert (tmp_path / "a.jsonl").read_bytes() == (tmp_path / "b.jsonl").read_bytes()
    rows = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    assert {"prose", "code"} == {row["kind"] for row in rows}
    assert 200_000 < sum(len(row["text"].encode()) for row in rows) <= 300_000


def test_own_data_is_listed_and_nothing_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("b.txt", "a.jsonl.zst"):
        (tmp_path / name).write_text("x")
    main([str(tmp_path)])
    listed = capsys.readouterr().out.splitlines()
    assert listed == [str(path) for path in find_inputs([str(tmp_path)]).files]
    assert len(listed) == 2
    assert not (tmp_path / "corpus.jsonl").exists()


def test_an_existing_corpus_and_a_size_of_nothing_are_refused(tmp_path: Path) -> None:
    output = tmp_path / "corpus.jsonl"
    with pytest.raises(ConfigError, match="a corpus has a positive size"):
        main(["--output", str(output), "--max-mb", "0"])
    output.write_text("mine")
    with pytest.raises(ConfigError, match="the output exists"):
        main(["--output", str(output)])
    assert output.read_text() == "mine"
