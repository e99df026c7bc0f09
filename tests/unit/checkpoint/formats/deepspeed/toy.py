"""A ZeRO-1 folder as DeepSpeed lays it out, made by hand of a small GPT whose values are known."""

import math
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.checkpoint.folder.manifest import GridLayout
from megatron.checkpoint.formats.deepspeed.parameters import RECORD, KnownParameter, RunRecord
from megatron.checkpoint.formats.megatron.names import partition_of_name
from megatron.checkpoint.gpt_tensors import gpt_tensors
from megatron.config.model import ModelConfig
from megatron.mpu.partition import local_slice

MODEL = {
    "num_layers": 1,
    "hidden_size": 4,
    "num_attention_heads": 2,
    "ffn_hidden_size": 6,
    "max_position_embeddings": 8,
}
VOCABULARY, PADDED = 10, 12
KINDS = ("master", "exp_avg", "exp_avg_sq")
STEPS = 7
# The names of the last stage of a pipeline, which has the tied table too.
LAST_STAGE = ("embedding.word.weight", "final_norm.weight", "final_norm.bias")


def whole_values() -> dict[str, dict[str, Tensor]]:
    """By our name and kind; rows of the vocabulary beyond the true ones are zeros."""
    torch.manual_seed(3)
    shapes = gpt_tensors(ModelConfig(**MODEL), vocab_rows=PADDED, positions=8)
    found = {}
    for name, shape in shapes.items():
        found[name] = {kind: torch.randn(shape) for kind in KINDS}
        if name == "embedding.word.weight":
            for values in found[name].values():
                values[VOCABULARY:] = 0
    return found


def truth(values: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """What a source must give for `values` of a run in fp32."""
    found = {}
    for name, kinds in values.items():
        for kind, tensor in kinds.items():
            key = f"model/{name}" if kind == "master" else f"optimizer/{kind}/{name}"
            found[key] = tensor[:VOCABULARY] if name == "embedding.word.weight" else tensor
    return found


def write_folder(
    folder: Path,
    *,
    tp: int = 1,
    pp: int = 1,
    dp: int = 2,
    values: dict[str, dict[str, Tensor]] | None = None,
    last: dict[str, dict[str, Tensor]] | None = None,
    record: bool = True,
    state: Mapping[str, Any] | None = None,
) -> dict[str, Tensor]:
    """Write the folder; what must be read from it.

    Args:
        values: of the first stage; of all where `last` is not given.
        last: of the last stage, where they differ.
        state: more fields of the model states.
    """
    folder.mkdir(parents=True, exist_ok=True)
    values = values or whole_values()
    for stage in range(pp):
        of_stage = values if stage == 0 or last is None else last
        names = [n for n in of_stage if pp == 1 or (n in LAST_STAGE) == (stage > 0) or _tied(n)]
        for rank in range(tp):
            local = {
                name: {k: _part(name, t, rank, tp) for k, t in of_stage[name].items()}
                for name in names
            }
            number = f"{stage * tp + rank:02d}"
            _write_rank(folder, number, local, _client(tp, pp, dp, record), dp, dict(state or {}))
    return truth(values)


def _tied(name: str) -> bool:
    return name == "embedding.word.weight"


def _part(name: str, tensor: Tensor, rank: int, tp: int) -> Tensor:
    partition = partition_of_name(name, gated=False)
    return local_slice(tensor, partition, rank, tp).contiguous() if partition else tensor


def _client(tp: int, pp: int, dp: int, record: bool) -> dict[str, Any]:
    dimensions = {"checkpoint_parallel_dimensions": {"pp_degree": pp, "tp_degree": tp}}
    if not record:
        return dimensions
    shapes = gpt_tensors(ModelConfig(**MODEL), vocab_rows=VOCABULARY, positions=8)
    parameters = {
        name: KnownParameter(name, partition_of_name(name, gated=False), shape, tied=_tied(name))
        for name, shape in shapes.items()
    }
    run_record = RunRecord(
        iteration=STEPS,
        layout=GridLayout(tp=tp, pp=pp, dp=dp),
        progress={"iteration": STEPS},
        config={"model": MODEL},
        scalars={"optimizer": {"steps": STEPS, "loss_scaler": {}}},
        parameters=parameters,
    )
    return {RECORD: run_record.to_plain(), **dimensions}


def _write_rank(
    folder: Path,
    number: str,
    local: dict[str, dict[str, Tensor]],
    client: dict[str, Any],
    dp: int,
    more: dict[str, Any],
) -> None:
    shapes = {name: kinds["master"].shape for name, kinds in local.items()}
    flats = {k: torch.cat([kinds[k].reshape(-1) for kinds in local.values()]) for k in KINDS}
    length = math.ceil(flats["master"].numel() / dp)
    model = {
        "module": {name: kinds["master"] for name, kinds in local.items()},
        "buffer_names": [],
        "param_shapes": [shapes],
        "dp_world_size": dp,
        **client,
        **more,
    }
    torch.save(model, folder / f"mp_rank_{number}_model_states.pt")
    for rank in range(dp):
        own = slice(rank * length, (rank + 1) * length)
        moments = {kind: flats[kind][own].clone() for kind in KINDS[1:]}
        optimizer = {
            "base_optimizer_state": {"state": {0: {"step": torch.tensor(float(STEPS)), **moments}}},
            "single_partition_of_fp32_groups": [flats["master"][own].clone()],
            "param_slice_mappings": [_mappings(shapes, own)],
            "loss_scaler": None,
        }
        name = f"zero_pp_rank_{rank}_mp_rank_{number}_optim_states.pt"
        torch.save({"optimizer_state_dict": optimizer}, folder / name)


def _mappings(shapes: Mapping[str, torch.Size], own: slice) -> dict[str, Namespace]:
    found, at = {}, 0
    for name, shape in shapes.items():
        start, stop = max(at, own.start), min(at + shape.numel(), own.stop)
        if start < stop:
            found[name] = Namespace(numel=stop - start, start=start - own.start)
        at += shape.numel()
    return found
