"""The record of Hugging Face's model folders: weights and a config, without the state of a run."""

from pathlib import Path

from megatron.checkpoint.formats.format import Format
from megatron.checkpoint.formats.huggingface.source import CONFIG, HuggingFaceSource
from megatron.checkpoint.formats.huggingface.weights import NAMES
from megatron.checkpoint.formats.huggingface.writer import write_huggingface


def _recognise(directory: Path) -> bool:
    return (directory / CONFIG).is_file() and any((directory / name).is_file() for name in NAMES)


FORMAT = Format(
    name=HuggingFaceSource.format_name,
    recognise=_recognise,
    open_source=HuggingFaceSource,
    write=write_huggingface,
    has_optimizer=False,
    for_transformers=True,
)
