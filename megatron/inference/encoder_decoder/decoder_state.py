"""A static batch of rows that a decoder writes token by token, from the states of its encoder.

Rows that begin from the same row of the encoder, as beams do, share its keys and values. What a
reader would get wrong: all rows are at the same position, so nothing in the cache is padding.
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from megatron.device import free_memory_bytes
from megatron.errors import ConfigError
from megatron.inference.paged_cache import check_blocks_fit
from megatron.model.encoder_decoder.cross_attention import DecoderBlock
from megatron.model.encoder_decoder.geometry import encoder_mask
from megatron.model.encoder_decoder.relative_positions import RelativeBias
from megatron.model.geometry import CachedHeads
from megatron.model.stage import run_layers
from megatron.model.t5_model import T5Model
from megatron.mpu.collectives import all_gather
from megatron.mpu.context import ParallelContext
from megatron.ops.attention import ScoreChanges, attend_by_scores, attend_by_torch, for_each_head

FINAL_NORM, TABLE = "decoder.final_norm", "decoder.relative_positions.weight"


class DecoderState:
    """The tokens of all rows so far, as keys and values of each layer.

    Row c x b + i, of `copies` x b, reads row i of the b rows of the encoder. The model is in
    evaluation mode and keeps its weights.

    Args:
        inputs: the tokens of each row of the encoder; the shorter ones are filled up with `pad`.
        length: tokens of a row, at most.

    Raises:
        ConfigError: the model was built to share sequences out over ranks.
        MachineError: keys and values do not fit into memory.
    """

    @torch.inference_mode()
    def __init__(
        self,
        model: T5Model,
        ctx: ParallelContext,
        inputs: Sequence[Sequence[int]],
        *,
        pad: int,
        copies: int = 1,
        length: int,
    ) -> None:
        if model.build.sequence_parallel:
            raise ConfigError(
                "a model whose sequences are split over ranks cannot generate token by token",
                found="a model built with sequence_parallel=True",
                fix="build it without, from the same checkpoint: weights are split the same way",
            )
        self._model, self._ctx = model, ctx
        self._blocks = [each for each in model.modules() if isinstance(each, DecoderBlock)]
        self._encoder_rows, self._copies = len(inputs), copies
        self._rows, self._count = len(inputs) * copies, 0
        config = model.config
        groups, width = config.query_groups // ctx.tp.size, config.head_width
        longest = max(map(len, inputs))
        token_bytes = 2 * len(self._blocks) * groups * width * model.build.dtype.itemsize
        check_blocks_fit(
            self._rows * length + len(inputs) * longest,
            token_bytes,
            free_memory_bytes(),
            what=f"{self._rows} rows of {length} tokens behind {longest}",
        )
        device = next(model.parameters()).device
        tokens = torch.full((len(inputs), longest), pad, device=device)
        padding = torch.zeros_like(tokens)
        for row, each in enumerate(inputs):
            tokens[row, : len(each)] = torch.tensor(each, device=device)
            padding[row, : len(each)] = 1
        memory = model.encode(tokens, padding)
        self._memory = [each.cross_attention.keys_and_values(memory) for each in self._blocks]
        self._seen = encoder_mask(padding)
        # [2, layers, rows, tokens, g/tp, d]: keys, then values
        self._cache = memory.new_empty(
            (2, len(self._blocks), self._rows, length, groups, width), dtype=model.build.dtype
        )
        self._bias: Tensor | None = None
        self._table = dict(model.named_parameters()).get(TABLE)
        self._bias_of = RelativeBias(model.decoder_config, both_directions=False)
        names = [spec.name for spec in model.specs]
        self._head = model.specs[names.index(FINAL_NORM) :]

    @torch.inference_mode()
    def step(self, tokens: Sequence[int]) -> Tensor:
        """Append a token to each row, and return the scores [rows, v] of what follows.

        They are of the true vocabulary, on all ranks that share the model.
        """
        model, device = self._model, self._cache.device
        column = torch.tensor(tokens, device=device).unsqueeze(1)
        positions = torch.full_like(column, self._count)
        (hidden, _) = model.get_submodule("embedding")((column, positions))
        geometry = self._blocks[0].geometry
        at = positions[:1, :1]
        biases = geometry.biases(at, self._count + 1)
        if self._table is not None:
            own = self._bias_of.bias_of_keys(self._table, at[0], self._count + 1)
            biases = (biases[0] + own, biases[1] + own)
        self._biases = biases
        of_pass = geometry.cached(positions[:, 0], self)
        for block, memory in zip(self._blocks, self._memory):
            hidden = block.run(hidden, of_pass, partial(self._cross, block, memory))
        self._count += 1
        (logits,) = run_layers(model, self._head, (hidden,))
        return all_gather(logits[0], self._ctx.tp, dim=-1)[:, : model.build.vocab.true]

    @torch.inference_mode()
    def reorder(self, parents: Sequence[int]) -> None:
        """Let each row go on from another one, of the same row of the encoder."""
        rows = torch.tensor(parents, device=self._cache.device)
        used = self._cache[:, :, :, : self._count]
        used.copy_(used.index_select(2, rows))

    def attend(
        self, layer: int, heads: CachedHeads, *, is_wide: bool, soft_cap: float | None
    ) -> Tensor:
        """Store keys and values of the new tokens, and return the output of their queries.

        See `CachedAttention`.
        """
        self._cache[0, layer, :, self._count] = heads.keys
        self._cache[1, layer, :, self._count] = heads.values
        keys, values = self._cache[:, layer, :, : self._count + 1].transpose(2, 3)
        queries = heads.queries.flatten(1, 2).unsqueeze(2)  # [rows, a/tp, 1, d]
        keys, values = (for_each_head(each, queries.shape[1]) for each in (keys, values))
        mask = self._biases[is_wide].to(queries.dtype)
        if soft_cap is not None or heads.sinks is not None:
            changes = ScoreChanges(heads.sinks, soft_cap)
            out = attend_by_scores(queries, keys, values, causal=False, mask=mask, changes=changes)
        else:
            out = attend_by_torch(queries, keys, values, causal=False, mask=mask)
        return out.squeeze(2).view_as(heads.queries)

    def _cross(self, block: DecoderBlock, memory: tuple[Tensor, Tensor], hidden: Tensor) -> Tensor:
        """Return attention of rows [1, c b, h] to the encoder: the rows of one are its queries."""
        queries = hidden.view(self._copies, self._encoder_rows, -1)
        return block.cross_attention.attend(queries, *memory, self._seen).view_as(hidden)
