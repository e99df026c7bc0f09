"""Flags of other Megatrons whose meaning depends on the flags beside them.

Each rule gives such a flag its meaning in that Megatron, or refuses it with the equivalent flags.
What a reader would get wrong: rules see values of presets and of DeepSpeed's JSON too, and they
apply to command lines only; the config in a checkpoint is never reinterpreted.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import NamedTuple

from megatron.config.experts import LoadBalancing, RouterScoreFunction
from megatron.config.fields import default_of, flag_name
from megatron.config.fp8 import Fp8Recipe
from megatron.config.model import PositionEmbedding
from megatron.config.optimizer import ScheduleConfig
from megatron.config.parallel import ContextExchange, ShardingStrategy
from megatron.config.training import AttentionBackend, parse_batch_steps
from megatron.errors import ConfigError


class FlagValue(NamedTuple):
    """The value of a field that a flag of another Megatron stands for."""

    field: str
    value: object
    because: str


class NoChange(NamedTuple):
    """A flag that changes nothing beside the others."""

    because: str


class GivenFlags(NamedTuple):
    """A command line: its flags as they were spelled, and the values of fields."""

    words: Collection[str]
    values: Mapping[str, object]


Meaning = FlagValue | NoChange | ConfigError


class DependentFlag(NamedTuple):
    """A flag, its rule, and its text on the page of flags."""

    flag: str
    meaning: str
    rule: Callable[[GivenFlags], Iterator[Meaning]]
    is_ours: bool = True  # whether the parser has the flag


def meanings(given: GivenFlags) -> Iterator[tuple[str, Meaning]]:
    """Yield each flag whose meaning depends on others, with its meaning on this command line."""
    for dependent in DEPENDENT:
        for meaning in dependent.rule(given):
            yield dependent.flag, meaning


def _no_position_embedding(given: GivenFlags) -> Iterator[Meaning]:
    if "--no-position-embedding" not in given.words:
        return
    kind = given.values.get("position_embedding_type", PositionEmbedding.LEARNED)
    if kind == PositionEmbedding.LEARNED:
        yield ConfigError(
            "a table of positions was left out, and nothing was named in its place",
            found=f"--no-position-embedding with --position-embedding-type {kind}",
            fix="add --position-embedding-type rope, or use --position-embedding-type none for a "
            "model without positions",
        )
    else:
        yield NoChange(f"--position-embedding-type {kind} has no table of positions")


def _attention_backend(given: GivenFlags) -> Iterator[Meaning]:
    ranks, comm = given.values.get("context_parallel_size"), given.values.get("cp_comm_type")
    over_ranks = isinstance(ranks, int) and ranks > 1 and comm != ContextExchange.A2A
    if over_ranks and given.values.get("attention_backend") == AttentionBackend.FUSED:
        because = "attention over several ranks is merged by what that kernel returns"
        yield FlagValue("attention_backend", AttentionBackend.FLASH, because)


def _fp8_recipe(given: GivenFlags) -> Iterator[Meaning]:
    of_history = ("fp8_amax_history_len", "fp8_amax_compute_algo")
    if "fp8_recipe" not in given.values and any(name in given.values for name in of_history):
        yield FlagValue("fp8_recipe", Fp8Recipe.DELAYED, "a history of largest values is described")


def _group_query_attention(given: GivenFlags) -> Iterator[Meaning]:
    if "--group-query-attention" not in given.words:
        return
    groups = given.values.get("num_query_groups")
    if groups is None:
        yield FlagValue("num_query_groups", 1, "one group is what it stands for")
    else:
        yield NoChange(f"--num-query-groups {groups} says it already")


def _num_query_groups(given: GivenFlags) -> Iterator[Meaning]:
    groups, heads = (given.values.get(n) for n in ("num_query_groups", "num_attention_heads"))
    alone = "--num-query-groups" in given.words and "--group-query-attention" not in given.words
    if alone and groups is not None and groups != heads:
        yield ConfigError(
            "Megatron-LM ignores the number of query groups unless another flag turns them on",
            found=f"--num-query-groups {groups} without --group-query-attention",
            fix=f"add --group-query-attention, or use --num-key-value-heads {groups}; leave both "
            "out for one group per head",
        )


_ACTIVATIONS = ("swiglu", "glu_activation", "squared_relu", "relu", "openai_gelu", "onnx_safe")


def _is_unnamed_gelu(values: Mapping[str, object]) -> bool:
    return not any(values.get(name) for name in _ACTIVATIONS)


def _no_bias_gelu_fusion(given: GivenFlags) -> Iterator[Meaning]:
    if "--no-bias-gelu-fusion" not in given.words:
        return
    if _is_unnamed_gelu(given.values):
        yield FlagValue("onnx_safe", True, "GELU is its tanh form only in the fused kernel")
    else:
        yield NoChange("another flag names the activation")


def _disable_bias_linear(given: GivenFlags) -> Iterator[Meaning]:
    if (
        "--disable-bias-linear" not in given.words
        or given.values.get("add_bias_linear", True)
        or "--no-bias-gelu-fusion" in given.words
        or not _is_unnamed_gelu(given.values)
    ):
        return
    yield ConfigError(
        "other Megatrons compute GELU by its exact form where linear layers have no biases, and "
        "this one by its tanh form",
        found="--disable-bias-linear without a flag that names the activation",
        fix="add --openai-gelu for the tanh form, --onnx-safe for the exact one, or --swiglu",
    )


# Flags that only Megatron-DeepSpeed has: its defaults for experts are not those of Megatron-LM.
_DEEPSPEED_EXPERTS = frozenset(
    {
        *("--topk", "--moe-loss-coeff", "--moe-expert-parallel-size", "--mlp-type"),
        *("--expert-interval", "--moe-train-capacity-factor", "--moe-eval-capacity-factor"),
        *("--moe-min-capacity", "--disable-moe-token-dropping", "--use-tutel"),
        *("--disable-moe-top2-2nd-expert-sampling", "--enable-expert-tensor-parallelism"),
        "--create-moe-param-group",
    }
)
# Flags that only Megatron-LM has; beside those above they leave open whose defaults are meant.
_MEGATRON_LM_EXPERTS = (
    *("--moe-router-", "--moe-aux-loss-coeff", "--moe-layer-freq", "--moe-expert-capacity-factor"),
    *("--moe-shared-", "--moe-grouped-gemm", "--moe-token-d", "--expert-model-"),
)
_DROPLESS = "--disable-moe-token-dropping"


class _ExpertDefault(NamedTuple):
    """A default of Megatron-DeepSpeed; `spelled_out` is to be added beside Megatron-LM's flags."""

    field: str
    value: object
    spelled_out: str = ""  # empty: may be left out


_DEEPSPEED_DEFAULTS = (
    _ExpertDefault(
        "moe_router_topk", 1, "--moe-router-topk 2, or --moe-router-topk 1 --moe-router-pre-softmax"
    ),
    _ExpertDefault(
        "moe_aux_loss_coeff",
        0.1,
        "--moe-loss-coeff 0, or --moe-loss-coeff 0.1 --moe-router-load-balancing-type aux_loss",
    ),
    _ExpertDefault(
        "expert_interval", 2, "--expert-interval 2, or --expert-interval 1 for every layer"
    ),
)
_DEEPSPEED_CAPACITY = (
    _ExpertDefault(
        "moe_expert_capacity_factor",
        1.0,
        f"{_DROPLESS}, or --moe-train-capacity-factor 1.0, of each sequence here",
    ),
    _ExpertDefault("moe_eval_capacity_factor", 1.0),
    _ExpertDefault("moe_min_capacity", 4),
)


def _num_experts(given: GivenFlags) -> Iterator[Meaning]:
    experts = given.values.get("num_experts")
    if not isinstance(experts, int) or experts <= 1:
        return
    deepspeed_flags = sorted(_DEEPSPEED_EXPERTS & set(given.words))
    other_flags = sorted(word for word in given.words if word.startswith(_MEGATRON_LM_EXPERTS))
    if deepspeed_flags and not other_flags:
        yield from _deepspeed_experts(given)
    elif deepspeed_flags:
        yield from _undecided_defaults(given, f"{deepspeed_flags[0]} and {other_flags[0]}")
    elif "moe_router_topk" not in given.values:
        yield ConfigError(
            "a token takes 2 experts in Megatron-LM and 1 in Megatron-DeepSpeed unless a flag says "
            "how many",
            found=f"--num-experts {experts} without --moe-router-topk",
            fix=f"add {_DEEPSPEED_DEFAULTS[0].spelled_out}",
        )


def _missing_defaults(given: GivenFlags) -> list[_ExpertDefault]:
    capacity = () if _DROPLESS in given.words else _DEEPSPEED_CAPACITY
    defaults = _DEEPSPEED_DEFAULTS + capacity
    return [default for default in defaults if default.field not in given.values]


def _undecided_defaults(given: GivenFlags, flags: str) -> Iterator[Meaning]:
    for default in _missing_defaults(given):
        if default.spelled_out:
            yield ConfigError(
                "flags for experts of two Megatrons are mixed, whose defaults differ",
                found=f"{flags} without {flag_name(default.field)}",
                fix=f"add {default.spelled_out}",
            )


def _deepspeed_experts(given: GivenFlags) -> Iterator[Meaning]:
    missing = {default.field: default.value for default in _missing_defaults(given)}
    for field, value in missing.items():
        yield FlagValue(field, value, "it is Megatron-DeepSpeed's default")
    values = missing | dict(given.values)
    taken, weight = values["moe_router_topk"], values["moe_aux_loss_coeff"]
    if taken == 1:
        because = "there the share of the only expert is a probability among all experts"
        yield FlagValue("moe_router_pre_softmax", True, because)
    if weight != 0:
        because = "its loss is of the tokens of a micro-batch together"
        yield FlagValue("moe_router_load_balancing_type", LoadBalancing.AUX_LOSS, because)
    if taken != 1 and weight != 0:
        yield ConfigError(
            "Megatron-DeepSpeed balances the first choices of tokens alone, and all losses here "
            "balance all choices",
            found=f"--topk {taken}, --moe-loss-coeff {weight}",
            fix="use --moe-loss-coeff 0, or --topk 1",
        )


def _without_dropping(given: GivenFlags) -> Iterator[Meaning]:
    if _DROPLESS not in given.words:
        return
    factor = given.values.get("moe_expert_capacity_factor")
    if factor is None:
        yield NoChange("without --moe-expert-capacity-factor no token is dropped")
    else:
        yield ConfigError(
            "experts have a capacity, and no token beyond it is to be dropped",
            found=f"--moe-expert-capacity-factor {factor}, {_DROPLESS}",
            fix="leave one of the two out",
        )


def _padded_to_capacity(given: GivenFlags) -> Iterator[Meaning]:
    if "--moe-pad-expert-input-to-capacity" not in given.words:
        return
    if given.values.get("moe_expert_capacity_factor") is None:
        yield ConfigError(
            "there is no capacity to which the tokens of an expert could be padded",
            found="--moe-pad-expert-input-to-capacity without --moe-expert-capacity-factor",
            fix="leave it out, or give --moe-expert-capacity-factor, such as 1.25",
        )
    else:
        yield NoChange("padding changes no number, and takes time")


def _balance_without_weight(given: GivenFlags) -> Iterator[Meaning]:
    kind = given.values.get("moe_router_load_balancing_type")
    # A weight that was left out may have been forgotten.
    is_loss = any(kind == one for one in LoadBalancing if one.is_loss)
    if is_loss and given.values.get("moe_aux_loss_coeff") == 0:
        because = "a loss of weight 0 balances nothing"
        yield FlagValue("moe_router_load_balancing_type", LoadBalancing.NONE, because)


def _sinkhorn(given: GivenFlags) -> Iterator[Meaning]:
    kind = given.values.get("moe_router_load_balancing_type")
    if kind != LoadBalancing.SINKHORN:
        return
    if given.values.get("moe_router_topk") == 1:
        because = "there the share of the only expert is its sigmoid"
        yield FlagValue("moe_router_score_function", RouterScoreFunction.SIGMOID, because)
    else:
        because = "there shares are probabilities among all experts"
        yield FlagValue("moe_router_pre_softmax", True, because)


def _pre_softmax(given: GivenFlags) -> Iterator[Meaning]:
    score = given.values.get("moe_router_score_function")
    if given.values.get("moe_router_pre_softmax") and score == RouterScoreFunction.SIGMOID:
        because = "Megatron-LM looks at it for the softmax alone, and shares are sigmoids"
        yield FlagValue("moe_router_pre_softmax", False, because)


def _save_interval(given: GivenFlags) -> Iterator[Meaning]:
    interval = given.values.get("save_interval")
    if interval is not None and given.values.get("save") is None:
        yield NoChange("nothing is saved without --save")


def _partition_activations(given: GivenFlags) -> Iterator[Meaning]:
    if "--partition-activations" not in given.words:
        return
    if given.values.get("tensor_model_parallel_size", 1) == 1:
        yield NoChange("there are no tensor-parallel ranks to split saved activations over")
    else:
        yield FlagValue("distribute_saved_activations", True, "it is DeepSpeed's name of it")


def _lengths_in_tokens(stem: str) -> Callable[[GivenFlags], Iterator[Meaning]]:
    def rule(given: GivenFlags) -> Iterator[Meaning]:
        tokens = given.values.get(f"lr_{stem}_tokens")
        for name in (f"lr_{stem}_samples", f"lr_{stem}_iters"):
            if tokens is not None and given.values.get(name):
                yield FlagValue(name, _UNSET[name], f"--lr-{stem}-tokens overrides it there")

    return rule


# What lengths are where no flag gives them.
_UNSET = {
    name: default_of(ScheduleConfig, name)
    for name in ("lr_decay_samples", "lr_decay_iters", "lr_warmup_samples", "lr_warmup_iters")
}


def _tiktoken_pattern(given: GivenFlags) -> Iterator[Meaning]:
    kind = given.values.get("tokenizer_type")
    if "tiktoken_pattern" in given.values and kind != "TikTokenizer":
        yield NoChange(f"{kind} does not split text by it")


def _step_batch_size_schedule(given: GivenFlags) -> Iterator[Meaning]:
    text = given.values.get("step_batch_size_schedule")
    if not isinstance(text, str) or given.values.get("global_batch_size") is not None:
        return
    try:
        largest = max(step.size for step in parse_batch_steps(text))
    except ConfigError:
        return  # the training's own checks report it
    yield FlagValue("global_batch_size", largest, "it is the largest of the schedule")


_FULLY_SHARDED = ("--use-torch-fsdp2", "--use-megatron-fsdp", "--use-custom-fsdp")


def _fully_sharded(given: GivenFlags) -> Iterator[Meaning]:
    if not set(_FULLY_SHARDED) & set(given.words):
        return
    strategy = given.values.get("data_parallel_sharding_strategy")
    if strategy is None:
        value = ShardingStrategy.OPTIM_GRADS_PARAMS
        yield FlagValue(
            "data_parallel_sharding_strategy", value, "its strategy where none is given"
        )
    else:
        yield NoChange(f"--data-parallel-sharding-strategy {strategy} says it already")


DEPENDENT: tuple[DependentFlag, ...] = (
    *(
        DependentFlag(
            flag,
            "`--data-parallel-sharding-strategy optim_grads_params`, or the strategy that is given",
            _fully_sharded,
            is_ours=False,
        )
        for flag in _FULLY_SHARDED
    ),
    DependentFlag(
        "--global-batch-size",
        "the largest of `--step-batch-size-schedule` where it is not given",
        _step_batch_size_schedule,
    ),
    DependentFlag(
        "--attention-backend",
        f"`{AttentionBackend.FUSED}` is `{AttentionBackend.FLASH}` beside "
        "`--context-parallel-size`, but for `--cp-comm-type a2a`: a kernel of the same results",
        _attention_backend,
    ),
    *(
        DependentFlag(
            f"--lr-{stem}-tokens",
            f"overrides `--lr-{stem}-samples` and `--lr-{stem}-iters`, as in Megatron-DeepSpeed",
            _lengths_in_tokens(stem),
        )
        for stem in ("decay", "warmup")
    ),
    DependentFlag(
        "--tiktoken-pattern",
        "no effect but with `--tokenizer-type TikTokenizer`",
        _tiktoken_pattern,
    ),
    DependentFlag(
        "--partition-activations",
        "`--distribute-saved-activations`; no effect on one tensor-parallel rank",
        _partition_activations,
        is_ours=False,
    ),
    DependentFlag("--save-interval", "no effect without `--save`", _save_interval),
    DependentFlag(
        "--no-position-embedding",
        "beside `--position-embedding-type rope` (or any other without a table) no effect, as in "
        "Megatron-LM, where rope stays; otherwise refused",
        _no_position_embedding,
        is_ours=False,
    ),
    DependentFlag(
        "--group-query-attention",
        "`--num-query-groups 1`, or the number that is given",
        _group_query_attention,
        is_ours=False,
    ),
    DependentFlag(
        "--num-query-groups",
        "refused without `--group-query-attention`, where Megatron-LM ignores it; "
        "`--num-key-value-heads` needs no switch",
        _num_query_groups,
    ),
    DependentFlag(
        "--no-bias-gelu-fusion",
        "`--onnx-safe`, as GELU is its tanh form only in the fused kernel; no effect beside a flag "
        "that names the activation",
        _no_bias_gelu_fusion,
        is_ours=False,
    ),
    DependentFlag(
        "--fp8-recipe",
        f"`{Fp8Recipe.DELAYED}` where it is not given beside `--fp8-amax-history-len` or "
        "`--fp8-amax-compute-algo`, as in other Megatrons",
        _fp8_recipe,
    ),
    DependentFlag(
        "--disable-bias-linear",
        "refused without a flag that names the activation: other Megatrons then take the exact "
        "form of GELU",
        _disable_bias_linear,
    ),
    DependentFlag(
        "--num-experts",
        "above 1 refused without `--moe-router-topk`; beside flags that only Megatron-DeepSpeed "
        "has its defaults: `--topk 1` with `--moe-router-pre-softmax`, `--moe-loss-coeff 0.1` of "
        "`aux_loss`, `--expert-interval 2`, and `--moe-train-capacity-factor 1.0` with "
        "`--moe-min-capacity 4` unless `--disable-moe-token-dropping`; refused where flags of both "
        "Megatrons leave open whose defaults are meant",
        _num_experts,
    ),
    DependentFlag(
        _DROPLESS,
        "no effect; refused beside `--moe-expert-capacity-factor`",
        _without_dropping,
        is_ours=False,
    ),
    DependentFlag(
        "--moe-pad-expert-input-to-capacity",
        "no effect beside `--moe-expert-capacity-factor`; refused without it, as in Megatron-LM",
        _padded_to_capacity,
        is_ours=False,
    ),
    DependentFlag(
        "--moe-router-load-balancing-type",
        f"`{LoadBalancing.NONE}` beside `--moe-aux-loss-coeff 0`",
        _balance_without_weight,
    ),
    DependentFlag(
        "--moe-router-load-balancing-type",
        f"`{LoadBalancing.SINKHORN}` also `--moe-router-score-function sigmoid` for one expert of "
        "a token, `--moe-router-pre-softmax` for several, which is what it means in Megatron-LM",
        _sinkhorn,
    ),
    DependentFlag(
        "--moe-router-pre-softmax",
        "no effect beside `--moe-router-score-function sigmoid`, as in Megatron-LM",
        _pre_softmax,
    ),
)

# Words that the parser does not have and a rule explains.
EXPLAINED: frozenset[str] = frozenset(one.flag for one in DEPENDENT if not one.is_ours)

# Defaults of other Megatrons, by the field whose default here differs.
OTHER_DEFAULTS: Mapping[str, str] = {
    "eval_interval": "Megatron-LM does not evaluate; Megatron-DeepSpeed as here",
    "exit_signal_handler": "off: SIGTERM ends the run without a checkpoint",
    "accumulate_allreduce_grads_in_fp32": "off but with `--bf16`, so that `--fp16` accumulates in "
    "float16",
    "fp8_recipe": "delayed",
    "fp8_amax_history_len": "1 step",
    "fp8_amax_compute_algo": "most_recent",
}
