"""Config files of three languages, and what is wrong with a file."""

from pathlib import Path

import pytest

from megatron.config.files.reading import read_content
from megatron.errors import ConfigError

_TEXTS = {
    "run.yaml": "model:\n  num_layers: 2\nlr: 1e-3\nsplit: 969,30,1\n",
    "run.yml": "model: {num_layers: 2}\nlr: 0.001\nsplit: 969,30,1\n",
    "run.json": '{"model": {"num_layers": 2}, "lr": 1e-3, "split": "969,30,1"}',
    "run.toml": 'lr = 1e-3\nsplit = "969,30,1"\n[model]\nnum_layers = 2\n',
}


def _written(folder: Path, name: str, text: str) -> str:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return str(path)


@pytest.mark.parametrize("name", _TEXTS)
def test_the_same_content_in_every_language(tmp_path: Path, name: str) -> None:
    content = read_content(_written(tmp_path, name, _TEXTS[name]))
    assert content.values == {"model": {"num_layers": 2}, "lr": 1e-3, "split": "969,30,1"}


def test_the_place_of_a_key_has_its_line_where_that_is_known(tmp_path: Path) -> None:
    of_yaml = read_content(_written(tmp_path, "a.yaml", _TEXTS["run.yaml"]))
    assert of_yaml.place("model", "num_layers") == f"{tmp_path}/a.yaml, line 2"
    of_json = read_content(_written(tmp_path, "a.json", _TEXTS["run.json"]))
    assert of_json.place("lr") == f"{tmp_path}/a.json"


@pytest.mark.parametrize(
    ("name", "text", "problem", "found"),
    [
        ("a.yaml", "a: 1\n\tb: 2", "cannot be read as YAML", "a tab stands before a key in line 2"),
        ("a.yaml", "a: 1\na: 2", "cannot be read as YAML", "a stands twice, in line 1 and in line"),
        ("a.yaml", "[1]", "a config file has no keys", "one list"),
        ("a.json", '{"a": 1, "a": 2}', "cannot be read as JSON", "a: named twice"),
        ("a.json", '{"a": 1,}', "cannot be read as JSON", "line 1"),
        ("a.json", "3", "a config file has no keys", "one int"),
        ("a.toml", "a = 1\na = 2\nb = 3", "cannot be read as TOML", "line 2"),
        ("a.ini", "a = 1", "the language of a config file is not known", "--config "),
    ],
)
def test_what_is_wrong_with_a_file_is_said(
    tmp_path: Path, name: str, text: str, problem: str, found: str
) -> None:
    path = _written(tmp_path, name, text)
    with pytest.raises(ConfigError) as caught:
        read_content(path)
    assert problem in caught.value.problem
    assert path in str(caught.value.found)
    assert found in str(caught.value.found)


def test_a_file_that_is_not_there_or_no_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "b.yaml").write_bytes(b"\xff\xfe")
    for name, said in (("a.yaml", "No such file"), ("b.yaml", "utf-8")):
        with pytest.raises(ConfigError) as caught:
            read_content(f"{tmp_path}/{name}")
        assert said in str(caught.value.found)
