"""The record of Megatron core's `torch_dist` layout."""

from megatron.checkpoint.formats.format import Format
from megatron.checkpoint.formats.torch_dist.source import TorchDistSource, is_torch_dist
from megatron.checkpoint.formats.torch_dist.writer import write_torch_dist

FORMAT = Format(
    name=TorchDistSource.format_name,
    recognise=is_torch_dist,
    open_source=TorchDistSource,
    write=write_torch_dist,
)
