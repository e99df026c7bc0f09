"""Folders that real DeepSpeed engines wrote of our GPT, and what must be read from them.

The engines here are DeepSpeed's, bare: what they hold is asked of DeepSpeed itself, so that a
source of ours is compared with nothing of ours.
"""

import io
import os
from argparse import Namespace
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron.checkpoint.folder.manifest import GridLayout
from megatron.checkpoint.formats.deepspeed.parameters import (
    RECORD,
    UNIVERSAL_INFO,
    RunRecord,
    describe_parameter,
    merged,
    universal_info,
)
from megatron.config.precision import PrecisionConfig
from megatron.engine.deepspeed.grid import DeepSpeedGrid, mark_tensor_parallel
from megatron.engine.deepspeed.start import start_deepspeed
from megatron.model.gpt_model import GPTModel
from megatron.mpu.collectives import all_gather_object
from megatron.mpu.context import ParallelContext
from megatron.mpu.partition import Partition, init_of, join_slices, partition_of
from megatron.mpu.topology import Topology
from megatron.optimizer.param_groups import param_groups
from tests.support.models import tiny_build, tiny_config, tiny_model
from tests.support.ranks import run_on_ranks

STEPS = 2
DEADLINE_S = 120.0
DIVISIBLE_BY = 8  # what the tiny vocabulary is padded to a multiple of, at every grid
SEQUENCE = 12

# Halves that must stay in order, and a head of its own.
GATED = (
    ("swiglu", True),
    ("ffn_hidden_size", 24),
    ("untie_embeddings_and_output_weights", True),
)
KINDS = ("master", "exp_avg", "exp_avg_sq")


class Case(NamedTuple):
    """One engine: stage, grid, precision ("fp32" or "bf16"), and changes to the tiny model."""

    stage: int
    tp: int = 1
    dp: int = 1
    precision: str = "fp32"
    model: tuple[tuple[str, Any], ...] = ()
    record: bool = True  # of ours in the client state
    info: bool = True  # for DeepSpeed's own converter
    zero: tuple[tuple[str, Any], ...] = ()  # of the block `zero_optimization`
    json: tuple[tuple[str, Any], ...] = ()


class Local(NamedTuple):
    """What one rank has of one parameter, by kind; whole but for tensor parallelism."""

    values: dict[str, Tensor]
    partition: Partition | None
    true_rows: int | None


def write(case: Case, folder: Path, tag: str = "global_step2") -> dict[str, Tensor]:
    """Train two steps, save to `folder`/`tag`, and return what was saved, by our names."""
    world = case.tp * case.dp
    ranks = run_on_ranks(
        world, _train_and_save, case, str(folder), tag, timeout_s=DEADLINE_S, deepspeed=True
    )
    return joined(ranks[: case.tp], case)


def read_universal(case: Case, folder: Path, tag: str) -> dict[str, Tensor]:
    """What a real engine of another layout holds after it has loaded a universal folder."""
    world = case.tp * case.dp
    ranks = run_on_ranks(
        world, _load_universal, case, str(folder), tag, timeout_s=DEADLINE_S, deepspeed=True
    )
    return joined(ranks[: case.tp], case)


def convert(folder: Path) -> Path:
    """What DeepSpeed's own converter makes of a checkpoint: a universal folder beside it."""
    made = folder.with_name(f"{folder.name}_universal")
    run_on_ranks(1, _convert, str(folder), str(made), timeout_s=DEADLINE_S, deepspeed=True)
    return made


def _convert(folder: str, made: str) -> None:
    from deepspeed.checkpoint import ds_to_universal

    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        ds_to_universal.main(
            Namespace(
                input_folder=folder,
                output_folder=made,
                num_extract_workers=1,
                num_merge_workers=1,
                keep_temp_folder=False,
                strict=True,
                inject_missing_state=True,
            )
        )


def joined(ranks: list[dict[str, Local]], case: Case) -> dict[str, Tensor]:
    """Whole tensors by the names that sources use."""
    found = {}
    for name, first in ranks[0].items():
        for kind in first.values:
            parts = [rank[name].values[kind] for rank in ranks]
            tensor = join_slices(parts, first.partition) if first.partition else parts[0]
            if first.true_rows is not None:
                tensor = tensor[: first.true_rows]
            key = f"model/{name}" if kind == "weight" else f"optimizer/{kind}/{name}"
            if kind != "master" or case.precision != "fp32":
                found[key] = tensor
    return found


def _train_and_save(case: Case, folder: str, tag: str) -> dict[str, Local]:
    ctx = ParallelContext.build(Topology(tp=case.tp, dp=case.dp))
    engine, model = _engine(case, ctx)
    tokens = torch.arange(case.dp * SEQUENCE).view(case.dp, SEQUENCE) * 7 % 50
    own_tokens = tokens[ctx.dp.rank : ctx.dp.rank + 1]
    for step in range(STEPS):
        loss = engine(own_tokens, labels=(own_tokens + 1 + step) % 50)
        engine.backward(loss.total / loss.count)
        engine.step()
    engine.save_checkpoint(folder, tag=tag, client_state=_client_state(case, model, ctx))
    return held_by(engine, model, case)


def _load_universal(case: Case, folder: str, tag: str) -> dict[str, Local]:
    ctx = ParallelContext.build(Topology(tp=case.tp, dp=case.dp))
    universal = (("checkpoint", {"load_universal": True}),)
    engine, model = _engine(case._replace(json=(*case.json, *universal)), ctx)
    path, state = engine.load_checkpoint(folder, tag=tag)
    assert path is not None
    assert state["iteration"] == STEPS
    return held_by(engine, model, case)


def _engine(case: Case, ctx: ParallelContext) -> tuple[Any, GPTModel]:
    os.environ["LOCAL_RANK"] = "0"  # which DeepSpeed requires, and does not use on a CPU
    deepspeed = start_deepspeed(ctx)
    precision = PrecisionConfig(bf16=case.precision == "bf16")
    model = tiny_model(tiny_config(**dict(case.model)), tiny_build(ctx, precision=precision))
    mark_tensor_parallel(model.parameters())
    groups = [
        {"params": [p for _, p in group.parameters], "weight_decay": 0.1}
        for group in param_groups(model.named_parameters())
    ]
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "train_batch_size": case.dp,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {
            "stage": case.stage,
            "stage3_param_persistence_threshold": 0,
            "sub_group_size": 3000,
            **dict(case.zero),
        },
        "bf16": {"enabled": case.precision == "bf16"},
        "gradient_clipping": 1.0,
        "zero_force_ds_cpu_optimizer": False,
        **dict(case.json),
    }
    if case.precision == "bf16" and case.stage == 1:
        settings["data_types"] = {"grad_accum_dtype": "fp32"}  # DeepSpeed's BF16_Optimizer
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(groups, lr=0.01),
        config=settings,
        mpu=DeepSpeedGrid(ctx),
        dist_init_required=False,
    )
    return engine, model


def _client_state(case: Case, model: GPTModel, ctx: ParallelContext) -> dict[str, Any]:
    if not case.record:
        return {"iteration": STEPS}
    own_parameters = {
        name: describe_parameter(name, p, tuple(getattr(p, "ds_shape", p.shape)), tp=ctx.tp.size)
        for name, p in model.named_parameters()
    }
    parameters = merged(all_gather_object(own_parameters, ctx.world))
    order = [n for group in param_groups(model.named_parameters()) for n, _ in group.parameters]
    record = RunRecord(
        iteration=STEPS,
        layout=GridLayout(tp=case.tp, pp=1, dp=case.dp),
        progress={"iteration": STEPS},
        config=_config(case),
        scalars={"optimizer": {"steps": STEPS, "loss_scaler": {}}},
        parameters=parameters,
        order=tuple(order),
    )
    state = {"iteration": STEPS, RECORD: record.to_plain()}
    return state | ({UNIVERSAL_INFO: universal_info(parameters)} if case.info else {})


def _config(case: Case) -> dict[str, dict[str, Any]]:
    model = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 4} | dict(case.model)
    return {"model": model, "data": {"seq_length": SEQUENCE}}


def held_by(engine: Any, model: GPTModel, case: Case) -> dict[str, Local]:
    """Return an engine's state of `model`, by our names, as DeepSpeed returns it."""
    import deepspeed.utils as ask

    if case.stage in (1, 2):
        # It links state after the step of the first group, when the second has none yet.
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    found = {}
    for name, p in model.named_parameters():
        if case.stage == 0:
            values = _without_zero(engine.optimizer, p)
        else:
            values = {kind: ask.safe_get_full_optimizer_state(p, kind) for kind in KINDS[1:]}
            values["master"] = ask.safe_get_full_fp32_param(p)
        weight = values["master"].to(p.dtype) if hasattr(p, "ds_id") else p.detach()
        values["weight"] = weight
        init = init_of(p)
        found[name] = Local(
            {kind: tensor.clone().view(weight.shape) for kind, tensor in values.items()},
            partition_of(p),
            init.true_rows if init else None,
        )
    return found


def _without_zero(optimizer: Any, p: torch.nn.Parameter) -> dict[str, Tensor]:
    master = p
    if hasattr(optimizer, "fp16_groups"):
        pairs = zip(optimizer.fp16_groups, optimizer.fp32_groups)
        master = next(
            m for low, high in pairs for q, m in zip(low, high) if q.data_ptr() == p.data_ptr()
        )
    state = optimizer.state[master] if master is p else optimizer.optimizer.state[master]
    return {"master": master.detach(), **{k: state[k] for k in KINDS[1:]}}
