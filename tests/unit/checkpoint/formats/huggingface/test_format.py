"""A folder with a config and weights is one of Hugging Face's, whatever else is in it."""

from pathlib import Path

import pytest

from megatron.checkpoint.formats.huggingface.format import FORMAT


@pytest.mark.parametrize(
    ("names", "is_one"),
    [
        (["config.json", "model.safetensors"], True),
        (["config.json", "model.safetensors.index.json", "README.md"], True),
        (["config.json", "pytorch_model.bin"], True),
        (["config.json"], False),
        (["model.safetensors"], False),
    ],
)
def test_a_config_and_weights_tell_it(tmp_path: Path, names: list[str], is_one: bool) -> None:
    for name in names:
        (tmp_path / name).touch()
    assert FORMAT.recognise(tmp_path) is is_one


def test_it_holds_weights_alone_and_only_tools_write_it() -> None:
    assert not FORMAT.has_optimizer
    assert FORMAT.save_run is None
    assert FORMAT.for_transformers
