"""What keys of gpt-neox about the course of a training mean together."""

import math
from collections.abc import Iterator, Mapping, Sequence

from megatron.config.neox.network import Meant
from megatron.config.neox.reader import KeyReader
from megatron.json_values import JsonObject, JsonValue

_ADAM: dict[str, JsonValue] = {"lr": 0.001, "betas": [0.9, 0.999], "eps": 1e-8}
_STAGES = {0: "no_shard", 1: "optim", 2: "optim_grads", 3: "optim_grads_params"}
_ZERO_WITHOUT_EFFECT = (
    *("stage", "allgather_partitions", "allgather_bucket_size", "overlap_comm", "reduce_scatter"),
    *("reduce_bucket_size", "contiguous_gradients", "load_from_fp32_weights", "elastic_checkpoint"),
    *("sub_group_size", "round_robin_gradients", "ignore_unused_parameters"),
)
_FP16 = ("enabled", "fp16", "type", "auto_cast")
_SCALING = {  # neox's block fp16, with DeepSpeed's defaults
    "loss_scale_window": ("loss_scale_window", 1000),
    "hysteresis": ("hysteresis", 2),
    "min_loss_scale": ("min_loss_scale", 1),
}


def _layout(reader: KeyReader) -> Iterator[Meant]:
    """Yield the sizes of tensor and pipeline parallelism; a size of 0 is 1."""
    for key in ("pipe_parallel_size", "model_parallel_size"):
        kind = "pipeline" if key == "pipe_parallel_size" else "tensor"
        yield Meant(f"{kind}_model_parallel_size", max(1, reader.whole(key) or 1), key)
    fix = "use type:transformer|mlp, parameters or uniform: results are equal"
    method = "pipe_partition_method"
    cuts: dict[str, JsonValue] = {
        "type:transformer|mlp": "layers",
        "type:transformer": "layers",
        "uniform": "layers",
        "parameters": "parameters",
    }
    yield Meant("pipeline_balance", reader.word(method, cuts, fix), method)
    backend = "distributed_backend"
    found = reader.word(backend, {"nccl": None, "gloo": "gloo"}, "use nccl or gloo")
    yield Meant(backend, found, backend)  # NCCL is what a GPU has anyway, and no CPU


def _optimizer(reader: KeyReader) -> Iterator[Meant]:
    """Yield AdamW's numbers; weight decay and clipping are keys of their own."""
    block = reader.block("optimizer")
    kind = str(block.get("type", "Adam")).lower()
    if kind not in ("adam", "cpu_adam"):
        problem = f"the optimizer {kind} is not here"
        reader.refuse("optimizer", problem, "use Adam")
    yield Meant("optimizer", "adam", "optimizer")
    yield Meant("optimizer_cpu_offload", kind == "cpu_adam" or _offloads(reader), "optimizer")
    params = block.get("params", {})
    known = params if isinstance(params, Mapping) else {"": None}
    if others := sorted(set(known) - set(_ADAM)):
        problem = f"params of the optimizer are lr, betas and eps, not {', '.join(others)}"
        reader.refuse("optimizer", problem, "give weight_decay at the top level; leave others out")
    found = _ADAM | dict(known)
    betas = found["betas"]
    if not isinstance(betas, Sequence) or isinstance(betas, str) or len(betas) != 2:
        reader.refuse("optimizer", "betas are no two numbers", "use [0.9, 0.95]")
    fields = {"lr": found["lr"], "adam_beta1": betas[0], "adam_beta2": betas[1]}
    for field, value in (fields | {"adam_eps": found["eps"]}).items():
        yield Meant(field, value, "optimizer")


def _sharding(reader: KeyReader) -> Iterator[Meant]:
    """Yield what replicas share out: the native engine's way to the numbers of ZeRO's stages."""
    block = reader.block("zero_optimization")
    stage = block.get("stage", 0)
    if not isinstance(stage, int) or stage not in _STAGES:
        reader.refuse("zero_optimization", "there is no such stage", "use 0, 1, 2 or 3")
    for key, value in block.items():
        is_known = key in _ZERO_WITHOUT_EFFECT or key.startswith("stage3_")
        is_offload = key in ("cpu_offload", "offload_optimizer")
        if not is_known and not is_offload and value not in (None, False, {}):
            problem = f"{key} of this block has no counterpart here"
            reader.refuse("zero_optimization", problem, "leave it out, or use --deepspeed")
    yield Meant("data_parallel_sharding_strategy", _STAGES[stage], "zero_optimization")


def _offloads(reader: KeyReader) -> bool:
    block = reader.block("zero_optimization")
    device = block.get("offload_optimizer")
    name = device.get("device", "none") if isinstance(device, Mapping) else "none"
    if name not in ("cpu", "none"):
        problem = f"the optimizer's state cannot be in {name}"
        reader.refuse("zero_optimization", problem, "use cpu")
    return name == "cpu" or block.get("cpu_offload") is True


def _precision(reader: KeyReader) -> Iterator[Meant]:
    """Yield the precision, and of float16 the loss scale."""
    words: dict[str, JsonValue] = {"fp16": "fp16", "bfloat16": "bf16", "fp32": None}
    named = reader.value("precision") is not None
    kind = reader.word("precision", words, f"use one of {', '.join(words)}") if named else None
    fp16, bf16 = reader.block("fp16"), reader.block("bf16")
    of_blocks = None
    if bf16.get("enabled") or str(fp16.get("type")).lower() == "bfloat16":
        of_blocks = "bf16"
    elif fp16.get("enabled"):
        of_blocks = "fp16"
    if named and of_blocks not in (None, kind):
        problem = f"the block {of_blocks} says otherwise"
        reader.refuse("precision", problem, "keep one of the two")
    kind = kind or of_blocks
    if kind is not None:
        yield Meant(str(kind), True, "precision" if named else str(of_blocks))
    if kind == "fp16":
        yield from _loss_scale(reader, fp16)


def _loss_scale(reader: KeyReader, block: JsonObject) -> Iterator[Meant]:
    known = (*_FP16, "loss_scale", "initial_scale_power", *_SCALING)
    if others := sorted(set(block) - set(known)):
        problem = f"{', '.join(others)} of this block has no counterpart here"
        reader.refuse("fp16", problem, f"use {', '.join(known)} alone")
    power = block.get("initial_scale_power", 16)
    if not isinstance(power, int):
        reader.refuse("fp16", "initial_scale_power is no whole number", "use 16")
    if block.get("loss_scale"):
        yield Meant("loss_scale", block["loss_scale"], "fp16")
    yield Meant("initial_loss_scale", float(2**power), "fp16")
    for key, (field, default) in _SCALING.items():
        yield Meant(field, block.get(key, default), "fp16")


def _schedule(reader: KeyReader) -> Iterator[Meant]:
    """Yield lengths and the decay of the learning rate.

    neox's linear decay goes to 0 and is clipped at min_lr, ours goes to min_lr: equal at 0. Its
    cosine goes up again after lr_decay_iters, and ours stays at min_lr.
    """
    iters, decay = reader.whole("train_iters"), reader.whole("lr_decay_iters")
    share = reader.number("lr_decay_fraction")
    if decay is None and share is not None and iters is not None:
        decay = max(1, math.floor(iters * share))
    styles: dict[str, JsonValue] = {style: style for style in ("linear", "cosine", "constant")}
    style = reader.word("lr_decay_style", styles, f"use one of {', '.join(styles)}")
    floor = reader.number("min_lr")
    if style == "linear" and floor:
        fix = "use min_lr 0, or lr_decay_style cosine, which ends at min_lr in both"
        reader.refuse("min_lr", "neox's linear decay goes to 0 and is clipped at min_lr", fix)
    if style == "cosine" and None not in (decay, iters) and (decay or 0) < (iters or 0):
        key = "lr_decay_iters" if reader.has("lr_decay_iters") else "lr_decay_fraction"
        reader.refuse(key, "neox's cosine rises again after its end", f"use {iters} iterations")
    yield Meant("train_iters", iters, "train_iters")
    yield Meant("lr_decay_style", style, "lr_decay_style")
    yield Meant("lr_decay_iters", decay, "lr_decay_iters")
    yield Meant("min_lr", floor, "min_lr")


def _recomputation(reader: KeyReader) -> Iterator[Meant]:
    """Yield which layers are recomputed; results are equal."""
    if not reader.switch("checkpoint_activations"):
        return
    yield Meant("recompute_granularity", "full", "checkpoint_activations")
    yield Meant(
        "recompute_num_layers", reader.whole("checkpoint_num_layers"), "checkpoint_num_layers"
    )
    shared = (
        reader.switch("partition_activations") and (reader.whole("model_parallel_size") or 1) > 1
    )
    yield Meant("distribute_saved_activations", shared, "partition_activations")
    yield Meant("checkpoint_in_cpu", reader.switch("checkpoint_in_cpu"), "checkpoint_in_cpu")


def _checkpoints(reader: KeyReader) -> Iterator[Meant]:
    """Yield when checkpoints are written, and what is in them."""
    every = reader.whole("checkpoint_factor")
    if every is not None:
        reader.word("checkpoint_scale", {"linear": None}, "use linear")
        yield Meant("save_interval", every, "checkpoint_factor")
    else:
        yield Meant("save_interval", reader.whole("save_interval"), "save_interval")
    key = "extra_save_iters"
    extra = reader.value(key) or []
    if not isinstance(extra, Sequence) or isinstance(extra, str):
        reader.refuse(key, "it is no list of iterations", "put them in brackets")
    # neox can save initial values too, which follow from the seed here.
    yield Meant(key, [iteration for iteration in extra if iteration != 0], key)
    for key in ("no_save_optim", "no_save_rng", "no_load_optim", "no_load_rng"):
        yield Meant(key.removeprefix("no_"), not reader.switch(key), key)


def _data(reader: KeyReader) -> Iterator[Meant]:
    """Yield the corpora: one that is split, or lists with weights, equal ones where none are."""
    uses = ("train", "valid", "test")
    given = [use for use in uses if reader.value(f"{use}_data_paths") is not None]
    if not given:
        yield Meant("split", reader.text("split"), "split")
        return
    if len(given) < len(uses):
        key, missing = f"{given[0]}_data_paths", ", ".join(set(uses) - set(given))
        reader.refuse(key, "all three uses have paths, or none", f"give those of {missing} too")
    for use in uses:
        key = f"{use}_data_paths"
        paths, weights = reader.value(key), reader.value(f"{use}_data_weights")
        if not isinstance(paths, Sequence) or isinstance(paths, str):
            reader.refuse(key, "it is no list of paths", "put it in brackets")
        if weights is None:
            weights = [1.0] * len(paths)
        if not isinstance(weights, Sequence) or len(weights) != len(paths):
            reader.refuse(
                f"{use}_data_weights", "it is no list of a weight for each path", "fit it"
            )
        pairs = [word for pair in zip(weights, paths, strict=True) for word in pair]
        yield Meant(f"{use}_data_path", pairs, key)


def _tokenizer(reader: KeyReader) -> Iterator[Meant]:
    """Yield the tokenizer, whose file has another flag for each kind."""
    kinds: dict[str, JsonValue] = {
        "gpt2bpetokenizer": "GPT2BPETokenizer",
        "hftokenizer": "HFTokenizer",
        "spmtokenizer": "SentencePieceTokenizer",
    }
    fix = "use GPT2BPETokenizer, HFTokenizer or SPMTokenizer"
    kind = reader.word("tokenizer_type", kinds, fix)
    yield Meant("tokenizer_type", kind, "tokenizer_type")
    files = {"GPT2BPETokenizer": "vocab_file", "HFTokenizer": "tokenizer_name_or_path"}
    yield Meant(files.get(str(kind), "tokenizer_model"), reader.text("vocab_file"), "vocab_file")


def _trackers(reader: KeyReader) -> Iterator[Meant]:
    """Yield the project of Weights & Biases, where neox was told to use it."""
    if reader.switch("use_wandb"):
        yield Meant("wandb_project", reader.text("wandb_project"), "wandb_project")
        yield Meant("wandb_exp_name", reader.text("wandb_run_name"), "wandb_run_name")
        yield Meant("wandb_entity", reader.text("wandb_team"), "wandb_team")


COURSE = (
    *(_layout, _optimizer, _sharding, _precision, _schedule, _recomputation, _checkpoints, _data),
    *(_tokenizer, _trackers),
)
