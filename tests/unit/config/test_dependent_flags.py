"""A flag that means something else elsewhere is given that meaning, or refused by name."""

from typing import Any, NamedTuple

import pytest

from megatron.arguments import parse_args, parse_given
from megatron.config.dependent_flags import DEPENDENT, EXPLAINED, OTHER_DEFAULTS
from megatron.config.fields import to_plain
from megatron.config.fp8 import AmaxAlgorithm, Fp8Config, Fp8Recipe
from megatron.config.model import Activation, PositionEmbedding
from megatron.config.parallel import ShardingStrategy
from megatron.config.precision import PrecisionConfig
from megatron.config.spellings import refused
from megatron.config.spellings.aliases import ALIASES, CONVERTED
from megatron.config.spellings.no_effect import NO_EFFECT
from megatron.config.training import TrainingConfig
from megatron.errors import MegatronError
from megatron.tokenizer.tokenizer import TokenizerSpec
from tests.unit.config.groups import COMMAND, a_run, problems_of

ROPE = "--position-embedding-type rope"
PLAIN_EXPERTS = "--num-experts 4 --disable-bias-linear --openai-gelu"
THEIR_EXPERTS = f"{PLAIN_EXPERTS} --topk 2"
MIXED_EXPERTS = f"{PLAIN_EXPERTS} --moe-router-topk 2"
# What Megatron-DeepSpeed does where no flag says otherwise.
DEEPSPEED_DEFAULTS: dict[str, Any] = {
    "num_experts": 4,
    "add_bias_linear": False,
    "openai_gelu": True,
    "moe_router_topk": 1,
    "moe_router_pre_softmax": True,
    "moe_aux_loss_coeff": 0.1,
    "moe_router_load_balancing_type": "aux_loss",
    "expert_interval": 2,
    "moe_expert_capacity_factor": 1.0,
    "moe_eval_capacity_factor": 1.0,
    "moe_min_capacity": 4,
}


class Row(NamedTuple):
    """Flags, and what they make of the fields of a model: those that are not defaults."""

    words: str
    model: dict[str, Any]


MEANS = [
    # A table of positions: Megatron-LM takes the flag beside rope alone, which stays.
    Row(f"{ROPE} --no-position-embedding", {"position_embedding_type": "rope"}),
    Row(f"--no-position-embedding {ROPE}", {"position_embedding_type": "rope"}),
    Row(
        "--use-rotary-position-embeddings --no-position-embedding",
        {"position_embedding_type": "rope"},
    ),
    Row(
        "--position-embedding-type alibi --no-position-embedding",
        {"position_embedding_type": "alibi"},
    ),
    Row(
        "--position-embedding-type none --no-position-embedding",
        {"position_embedding_type": "none"},
    ),
    # GELU without the fused kernel is the exact one, if it is GELU at all.
    Row("--no-bias-gelu-fusion", {"onnx_safe": True}),
    Row("--no-bias-gelu-fusion --openai-gelu", {"openai_gelu": True}),
    Row("--no-bias-gelu-fusion --onnx-safe", {"onnx_safe": True}),
    Row("--no-bias-gelu-fusion --swiglu", {"swiglu": True}),
    Row("--glu-activation geglu --no-bias-gelu-fusion", {"glu_activation": "geglu"}),
    Row("--no-bias-gelu-fusion --squared-relu", {"squared_relu": True}),
    Row("--no-bias-gelu-fusion --relu", {"relu": True}),
    Row(
        "--disable-bias-linear --no-bias-gelu-fusion",
        {"add_bias_linear": False, "onnx_safe": True},
    ),
    Row("--disable-bias-linear --openai-gelu", {"add_bias_linear": False, "openai_gelu": True}),
    Row("--disable-bias-linear --swiglu", {"add_bias_linear": False, "swiglu": True}),
    # Megatron-LM turns groups on by a switch, Megatron-DeepSpeed by their number.
    Row("--group-query-attention --num-query-groups 2", {"num_query_groups": 2}),
    Row("--group-query-attention", {"num_query_groups": 1}),
    Row("--num-key-value-heads 1", {"num_query_groups": 1}),
    Row("--num-query-groups 2", {"num_query_groups": 2}),  # as many as heads
    # Megatron-DeepSpeed's number of experts of a dense model.
    Row("--num-experts 1 --moe-expert-parallel-size 1", {"num_experts": 1}),
    Row(
        f"{PLAIN_EXPERTS} --moe-router-topk 2 --moe-layer-freq 1 --moe-router-dtype fp32 "
        "--moe-router-score-function softmax",
        {"num_experts": 4, "add_bias_linear": False, "openai_gelu": True},
    ),
    *(
        Row(f"{PLAIN_EXPERTS} {words}", DEEPSPEED_DEFAULTS | differs)
        for words, differs in (
            ("--topk 1", {}),
            ("--create-moe-param-group", {}),
            (
                "--moe-loss-coeff 0.02 --expert-interval 1",
                {"moe_aux_loss_coeff": 0.02, "expert_interval": 1},
            ),
            (
                "--mlp-type residual --moe-min-capacity 8",
                {"mlp_type": "residual", "moe_min_capacity": 8},
            ),
        )
    ),
    Row(
        f"{PLAIN_EXPERTS} --topk 1 --moe-loss-coeff 0 --disable-moe-token-dropping",
        {
            "num_experts": 4,
            "add_bias_linear": False,
            "openai_gelu": True,
            "moe_router_topk": 1,
            "moe_router_pre_softmax": True,
            "expert_interval": 2,
        },
    ),
    Row(
        f"{THEIR_EXPERTS} --moe-loss-coeff 0 --expert-interval 1 --mlp-type standard "
        "--disable-moe-token-dropping",
        {
            "num_experts": 4,
            "add_bias_linear": False,
            "openai_gelu": True,
            "expert_interval": 1,
        },
    ),
    # So do those of Moonlight, which balances by biases.
    Row(
        f"{PLAIN_EXPERTS} --moe-router-topk 2 --moe-router-load-balancing-type seq_aux_loss "
        "--moe-aux-loss-coeff 0",
        {"num_experts": 4, "add_bias_linear": False, "openai_gelu": True},
    ),
    # Megatron-LM's shares depend on the number of experts of a token there.
    Row(
        f"{PLAIN_EXPERTS} --moe-router-topk 2 --moe-router-load-balancing-type sinkhorn",
        {
            "num_experts": 4,
            "add_bias_linear": False,
            "openai_gelu": True,
            "moe_router_load_balancing_type": "sinkhorn",
            "moe_router_pre_softmax": True,
        },
    ),
    Row(
        f"{PLAIN_EXPERTS} --moe-router-topk 1 --moe-router-load-balancing-type sinkhorn",
        {
            "num_experts": 4,
            "add_bias_linear": False,
            "openai_gelu": True,
            "moe_router_topk": 1,
            "moe_router_load_balancing_type": "sinkhorn",
            "moe_router_score_function": "sigmoid",
        },
    ),
    # Scripts of DeepSeek-V3 and its like give both; there the second one is not looked at.
    Row(
        f"{PLAIN_EXPERTS} --moe-router-topk 2 --moe-router-score-function sigmoid "
        "--moe-router-pre-softmax",
        {
            "num_experts": 4,
            "add_bias_linear": False,
            "openai_gelu": True,
            "moe_router_score_function": "sigmoid",
        },
    ),
    Row(
        f"{THEIR_EXPERTS} --moe-loss-coeff 0 --expert-interval 2 --moe-train-capacity-factor 1.0 "
        "--moe-eval-capacity-factor 2 --moe-min-capacity 4 --moe-pad-expert-input-to-capacity",
        {
            "num_experts": 4,
            "add_bias_linear": False,
            "openai_gelu": True,
            "expert_interval": 2,
            "moe_expert_capacity_factor": 1.0,
            "moe_eval_capacity_factor": 2.0,
            "moe_min_capacity": 4,
        },
    ),
]


@pytest.mark.parametrize("row", MEANS, ids=[row.words for row in MEANS])
def test_a_flag_has_the_meaning_that_it_has_elsewhere(row: Row) -> None:
    model, plain = (
        to_plain(parse_args([*COMMAND, *row.words.split()]).model),
        to_plain(a_run().model),
    )
    assert {name: value for name, value in model.items() if value != plain[name]} == row.model


REFUSED = [
    ("--no-position-embedding", "--no-position-embedding with", "--position-embedding-type rope"),
    ("--disable-bias-linear", "without a flag that names the activation", "--openai-gelu for"),
    ("--num-query-groups 1", "--num-query-groups 1 without", "add --group-query-attention, or"),
    (f"{PLAIN_EXPERTS}", "--num-experts 4 without --moe-router-topk", "add --moe-router-topk 2"),
    # With flags of both it is open whose defaults are meant.
    (
        f"{MIXED_EXPERTS} --expert-interval 1 --disable-moe-token-dropping",
        "--disable-moe-token-dropping and --moe-router-topk without --moe-aux-loss-coeff",
        "--moe-loss-coeff 0, or --moe-loss-coeff 0.1 --moe-router-load-balancing-type aux_loss",
    ),
    (
        f"{MIXED_EXPERTS} --moe-loss-coeff 0 --disable-moe-token-dropping",
        "without --expert-interval",
        "--expert-interval 2",
    ),
    (
        f"{MIXED_EXPERTS} --moe-loss-coeff 0 --expert-interval 2",
        "without --moe-expert-capacity-factor",
        "add --disable-moe-token-dropping, or --moe-train-capacity-factor 1.0",
    ),
    (
        f"{PLAIN_EXPERTS} --moe-grouped-gemm --moe-loss-coeff 0 --expert-interval 2 "
        "--disable-moe-token-dropping",
        "without --moe-router-topk",
        "add --moe-router-topk 2, or --moe-router-topk 1 --moe-router-pre-softmax",
    ),
    (
        f"{PLAIN_EXPERTS} --moe-router-topk 2 --moe-expert-capacity-factor 2 --expert-interval 2 "
        "--moe-loss-coeff 0 --disable-moe-token-dropping",
        "--moe-expert-capacity-factor 2.0, --disable-moe-token-dropping",
        "leave one of the two out",
    ),
    (
        f"{PLAIN_EXPERTS} --moe-router-topk 2 --moe-pad-expert-input-to-capacity",
        "--moe-pad-expert-input-to-capacity without --moe-expert-capacity-factor",
        "leave it out, or give",
    ),
    (
        f"{PLAIN_EXPERTS} --moe-router-topk 2 --moe-layer-freq ([0]+[1]*26)",
        "--moe-layer-freq ([0]+[1]*26), --num-layers 2",
        "such as ([0]*1+[1]*1)",
    ),
    ("--num-experts 1 8", "--num-experts 1 8", "use one value, such as --num-experts 1"),
    *(
        (
            f"{PLAIN_EXPERTS} --moe-router-topk 2 --moe-aux-loss-coeff 0.01 "
            f"--moe-router-load-balancing-type {kind}",
            f"--moe-router-load-balancing-type {kind}",
            "give one of none, seq_aux_loss",
        )
        for kind in ("quantile_balancing", "fair")
    ),
    (
        f"{PLAIN_EXPERTS} --moe-router-topk 2 --moe-aux-loss-coeff 0.01",  # there of `aux_loss`
        "--moe-router-load-balancing-type none, --moe-aux-loss-coeff 0.01",
        "give --moe-router-load-balancing-type seq_aux_loss",
    ),
    *(
        (f"--position-embedding-type {kind}", f"--position-embedding-type {kind}", "give one of")
        for kind in ("yarn", "mrope")
    ),
    *(
        (f"--optimizer {kind}", f"--optimizer {kind}", "give one of adam, sgd, lion, muon")
        for kind in ("dist_muon", "soap", "adaptive_muon")
    ),
    *(
        (
            f"--recompute-activations --recompute-modules {module}",
            f"--recompute-modules {module}",
            "give one of core_attn, mlp, act, layernorm",
        )
        for module in (
            *("moe_act", "moe", "shared_experts", "mla_up_proj", "gdn_norm_out"),
            *("gdp_in_proj", "gdp_qkv", "mhc"),
        )
    ),
    ("--moe-router-score-function sqrtsoftplus", "sqrtsoftplus", "give one of softmax, sigmoid"),
    ("--moe-router-dtype fp64", "--moe-router-dtype fp64", "use --moe-router-dtype fp32, or"),
    *(
        (f"--exp-avg{which}-dtype {kind}", f"--exp-avg{which}-dtype {kind}", "one of fp32, bf16")
        for which in ("", "-sq")
        for kind in ("fp16", "fp8")
    ),
]


@pytest.mark.parametrize(("words", "found", "fix"), REFUSED, ids=[row[0] for row in REFUSED])
def test_another_meaning_is_refused_by_name_with_a_fix(words: str, found: str, fix: str) -> None:
    (error,) = problems_of(*words.split())
    assert found in error.found
    assert fix in error.fix


def test_the_loss_of_first_choices_alone_is_refused() -> None:
    (error,) = problems_of(*f"{THEIR_EXPERTS} --moe-loss-coeff 0.1".split())
    assert "balances the first choices of tokens alone" in error.problem
    assert error.found == "--topk 2, --moe-loss-coeff 0.1"
    assert error.fix == "use --moe-loss-coeff 0, or --topk 1"


@pytest.mark.parametrize("kind", ["SFTTokenizer", "MultimodalTokenizer", "NullMultimodalTokenizer"])
def test_a_tokenizer_of_megatron_lm_alone_is_refused_by_name(kind: str) -> None:
    with pytest.raises(MegatronError) as caught:
        TokenizerSpec(tokenizer_type=kind).build()
    assert kind in caught.value.found
    assert "GPT2BPETokenizer" in caught.value.fix


def test_an_interval_of_saves_without_a_place_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    said = "--save-interval: accepted, has no effect here because nothing is saved without --save"
    assert parse_args([*COMMAND, "--save-interval", "10"]).checkpoint.save is None
    assert said in capsys.readouterr().out
    parse_args([*COMMAND, "--save-interval", "10", "--save", "here"])
    assert "--save-interval" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "recipe"),
    [
        ("", "tensorwise"),
        ("--fp8-amax-history-len 16", "delayed"),
        ("--fp8-amax-compute-algo max", "delayed"),
        ("--fp8-recipe delayed --fp8-amax-history-len 16", "delayed"),
    ],
)
def test_a_history_of_largest_values_is_that_of_delayed_scales(words: str, recipe: str) -> None:
    given = [*COMMAND, "--bf16", "--fp8-format", "hybrid", *words.split()]
    assert parse_args(given).fp8.fp8_recipe == recipe
    with pytest.raises(MegatronError, match="scales come from the values at hand"):
        parse_args([*given, "--fp8-recipe", "tensorwise", "--fp8-amax-history-len", "16"])


def test_presets_count_as_given() -> None:
    base = [*COMMAND[6:], "--model-preset", "mixtral-8x7b"]
    words = ["--no-position-embedding", "--group-query-attention", "--no-bias-gelu-fusion"]
    assert parse_args([*base, *words]) == parse_args(base)


@pytest.mark.parametrize(
    ("words", "backend"),
    [
        ("--context-parallel-size 2", "flash"),
        ("--context-parallel-size 2 --cp-comm-type all_gather", "flash"),
        ("--context-parallel-size 2 --cp-comm-type a2a", "fused"),
        ("--context-parallel-size 1", "fused"),
        ("", "fused"),
    ],
)
def test_a_fused_kernel_over_several_ranks_is_one_whose_results_are_merged(
    words: str, backend: str
) -> None:
    given = [*COMMAND, "--attention-backend", "fused", *words.split()]
    assert parse_args(given).training.attention_backend == backend


@pytest.mark.parametrize("stem", ["decay", "warmup"])
@pytest.mark.parametrize("unit", ["samples", "iters"])
def test_a_length_in_tokens_overrides_one_in_samples_or_iterations(stem: str, unit: str) -> None:
    samples = " ".join(COMMAND).replace("--train-iters 10", "--train-samples 1000").split()
    given = [*samples, "--lr-decay-tokens", "640", f"--lr-{stem}-tokens", "64"]
    assert parse_args([*given, f"--lr-{stem}-{unit}", "5"]) == parse_args(given)


@pytest.mark.parametrize("tp", [1, 2])
def test_saved_activations_are_split_where_there_are_ranks_to_do_so(tp: int) -> None:
    given = [*COMMAND, "--checkpoint-activations", "--tensor-model-parallel-size", str(tp)]
    config = parse_args([*given, "--partition-activations"])
    assert config.training.distribute_saved_activations == (tp > 1)


def test_a_pattern_means_nothing_to_other_tokenizers(capsys: pytest.CaptureFixture[str]) -> None:
    said = "--tiktoken-pattern: accepted, has no effect here because NullTokenizer does not split"
    parse_args([*COMMAND, "--tiktoken-pattern", "v2"])
    assert said in capsys.readouterr().out
    own = ["--tokenizer-type", "TikTokenizer", "--tokenizer-model", "t.json"]
    parse_args([*COMMAND, *own, "--tiktoken-pattern", "v2"])
    assert "--tiktoken-pattern" not in capsys.readouterr().out


def test_a_schedule_of_batch_sizes_names_the_global_batch_size() -> None:
    samples = " ".join(COMMAND).replace("--train-iters", "--train-samples").split()
    stepped = [*samples, "--step-batch-size-schedule", "0:16 1K:64 2K:32"]
    assert parse_args(stepped).training.global_batch_size == 64
    with pytest.raises(MegatronError, match="the global batch size is not the largest"):
        parse_args([*stepped, "--global-batch-size", "16"])
    with pytest.raises(MegatronError, match="cannot be read"):
        parse_args([*samples, "--step-batch-size-schedule", "16"])


@pytest.mark.parametrize("word", ["--use-torch-fsdp2", "--use-megatron-fsdp"])
def test_a_switch_of_full_sharding_is_its_strategy(word: str) -> None:
    full = ShardingStrategy.OPTIM_GRADS_PARAMS
    assert parse_args([*COMMAND, word]).parallel.sharding is full
    given = [*COMMAND, "--data-parallel-sharding-strategy", "optim_grads"]
    assert parse_args([*given, word]) == parse_args(given)
    kept = parse_args([*COMMAND, word, "--torch-fsdp2-no-reshard-after-forward"])
    assert not kept.parallel.reshard_after_forward


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            f"--no-position-embedding {ROPE}",
            "--no-position-embedding: accepted, has no effect here because "
            "--position-embedding-type rope has no table of positions",
        ),
        (
            "--no-bias-gelu-fusion",
            "--no-bias-gelu-fusion: taken as --onnx-safe True, because GELU is its tanh form only "
            "in the fused kernel",
        ),
        (
            "--group-query-attention",
            "--group-query-attention: taken as --num-query-groups 1, because one group is what it "
            "stands for",
        ),
    ],
)
def test_a_meaning_is_in_the_log(
    words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    parse_args([*COMMAND, *words.split()])
    assert message in capsys.readouterr().out


def test_flags_beside_a_checkpoint_mean_the_same() -> None:
    given = parse_given([*ROPE.split(), "--no-position-embedding", "--no-bias-gelu-fusion"])
    assert given == {"position_embedding_type": PositionEmbedding.ROPE, "onnx_safe": True}


def test_the_two_forms_of_gelu_are_what_the_flags_say() -> None:
    assert parse_args(COMMAND).model.activation is Activation.GELU_TANH
    exact = parse_args([*COMMAND, "--no-bias-gelu-fusion"]).model
    assert exact.activation is Activation.GELU_ERF


def test_no_other_table_explains_these_flags() -> None:
    assert not EXPLAINED & {*ALIASES, *CONVERTED, *NO_EFFECT, *refused.REFUSED, *refused.REMOVED}
    assert {one.flag for one in DEPENDENT} > EXPLAINED


def test_defaults_that_differ_are_still_the_ones_that_the_page_names() -> None:
    """What Megatron-LM and Megatron-DeepSpeed do otherwise where a flag is left out."""
    training, precision = TrainingConfig(micro_batch_size=1, train_iters=1), PrecisionConfig()
    assert training.eval_interval == 1000
    assert training.exit_signal_handler
    assert precision.accumulate_allreduce_grads_in_fp32
    assert Fp8Config().fp8_recipe is Fp8Recipe.TENSORWISE
    assert Fp8Config().history_length == 1024
    assert Fp8Config().amax_algorithm is AmaxAlgorithm.MAX
    assert len(OTHER_DEFAULTS) == 6
    assert a_run().data.split == "969, 30, 1"  # as in other Megatrons
