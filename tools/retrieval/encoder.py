"""A trained retriever made ready to map texts to vectors, on this rank of a tensor x data grid."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from megatron import device
from megatron.checkpoint import model_kind
from megatron.checkpoint.load.inference_config import Values
from megatron.config.run import RunConfig
from megatron.errors import ConfigError
from megatron.model.retrieval.biencoder import CONTEXT, QUERY, tower_carry, tower_layers
from megatron.model.stage import PipelineStage
from megatron.model_build import model_build
from megatron.mpu.context import ParallelContext
from megatron.tokenizer.tokenizer import Tokenizer
from megatron.trained_model import digest_of_checkpoint, initialize_for_inference, load_weights

BATCH_SIZE = 128  # rows that a replica reads together without a flag


class TextEncoder:
    """One tower of a retriever, without dropout and gradients."""

    def __init__(self, stage: PipelineStage, pad: int, *, width: int, batch_size: int) -> None:
        self._stage, self._pad = stage, pad
        self.width, self.batch_size = width, batch_size

    @torch.no_grad()
    def vectors(self, rows: Sequence[Sequence[int]]) -> Tensor:
        """Return the vectors of rows of tokens, [n, e] in fp32 on the CPU.

        Rows are filled up to the longest of their batch. All ranks that share the layers call this
        together.
        """
        found = [
            self._of_batch(rows[start : start + self.batch_size])
            for start in range(0, len(rows), self.batch_size)
        ]
        return torch.cat(found)

    def _of_batch(self, rows: Sequence[Sequence[int]]) -> Tensor:
        longest = max(map(len, rows))
        tokens = torch.tensor([[*row, *[self._pad] * (longest - len(row))] for row in rows])
        lengths = torch.tensor([len(row) for row in rows])
        mask = (torch.arange(longest) < lengths[:, None]).long()
        here = device.upload({"tokens": tokens, "mask": mask})
        vectors: Tensor = self._stage(tower_carry(here["tokens"], here["mask"]))[0]
        return vectors.float().cpu()


class LoadedRetriever(NamedTuple):
    """The towers of a checkpoint, by `QUERY` and `CONTEXT`, and what is needed to use them."""

    towers: Mapping[int, TextEncoder]
    tokenizer: Tokenizer
    config: RunConfig
    ctx: ParallelContext
    checkpoint: str  # a digest of its content


def load_retriever(
    folder: str | Path,
    iteration: int | None = None,
    *,
    given: Values,
    texts: Sequence[int] = (QUERY, CONTEXT),
    batch_size: int = BATCH_SIZE,
) -> LoadedRetriever:
    """Return towers of a checkpoint; all ranks call it together, which initialises this process.

    Args:
        given: flags beside the checkpoint's.
        texts: which towers.
        batch_size: rows that one replica reads together.

    Raises:
        CheckpointError: missing, damaged, or not of a retriever.
        ConfigError: towers are to be cut into pipeline stages, or the batch size is not positive.
    """
    stages = given.get("pipeline_model_parallel_size", 1)
    if stages != 1 or batch_size < 1:
        wrong = f"--pipeline-model-parallel-size {stages}, {batch_size} rows together"
        raise ConfigError(
            "a tower maps at least one row at a time, and is not cut into pipeline stages",
            found=wrong,
            fix="use --tensor-model-parallel-size to share its layers, and --indexer-batch-size "
            f"{BATCH_SIZE}",
        )
    flags = {**given, "sequence_parallel": False, "tp_comm_overlap": False}
    runtime = initialize_for_inference(folder, iteration, kind=model_kind.BIENCODER, given=flags)
    build, retrieval = model_build(runtime), runtime.config.retrieval
    pad = runtime.tokenizer.pad
    assert pad is not None  # noqa: S101  # invariant: it has trained with padding
    width = retrieval.biencoder_projection_dim or runtime.config.model.hidden_size
    towers: dict[int, TextEncoder] = {}
    for text in texts:
        with torch.device(device.current()):
            specs = tower_layers(runtime.config.model, build, retrieval, text=text)
            stage = PipelineStage(specs)
        part = f"{retrieval.towers[text]}."
        load_weights(stage, folder, iteration, runtime, part=part)
        towers[text] = TextEncoder(
            stage.eval().requires_grad_(False), pad, width=width, batch_size=batch_size
        )
    digest = digest_of_checkpoint(folder, iteration, runtime)
    return LoadedRetriever(towers, runtime.tokenizer, runtime.config, runtime.context, digest)
