"""ModelConfig: the shape of the network and how its values begin.

Only values of flags are stored; derived values are properties.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum

from megatron.config.blocks import (
    MUP_DEFAULTS,
    NormPlacement,
    QkNormScope,
    block_problems,
    mup_problems,
)
from megatron.config.experts import (
    LoadBalancing,
    MlpType,
    RouterScoreFunction,
    TokenDropPolicy,
    expert_problems,
)
from megatron.config.fields import check_field, default_of, flag, raise_all, to_plain
from megatron.config.layer_pattern import EVERY_LAYER, layers_of_pattern
from megatron.errors import ConfigError
from megatron.json_values import JsonValue


class PositionEmbedding(StrEnum):
    """How a model represents the positions of tokens."""

    LEARNED = "learned_absolute"
    ROPE = "rope"
    ALIBI = "alibi"
    RELATIVE = "relative"  # biases of ranges of distances, as in T5
    NONE = "none"


class RopeType(StrEnum):
    """The frequencies of rotary positions."""

    ROPE = "rope"
    YARN = "yarn"  # scaled for longer sequences, by part (Peng et al. 2023, arXiv 2309.00071)


class SoftmaxType(StrEnum):
    """The scores that share the probabilities of a row of attention with its keys."""

    VANILLA = "vanilla"  # none
    OFF_BY_ONE = "off-by-one"  # a score of 0
    LEARNABLE = "learnable"  # a score of each head, as in gpt-oss


class Normalization(StrEnum):
    """The normalisation before attention, before the MLP and at the end."""

    LAYER_NORM = "LayerNorm"
    RMS_NORM = "RMSNorm"


class GluActivation(StrEnum):
    """Gated linear units (Shazeer 2020, arXiv 2002.05202): act(gate) * up."""

    GEGLU = "geglu"
    GEGLU_TANH = "geglu_tanh"  # with the tanh form of GELU, as in Gemma
    LIGLU = "liglu"
    REGLU = "reglu"
    SWIGLU = "swiglu"
    QUICK_GEGLU = "quick_geglu"  # with the sigmoid form of GELU, as in gpt-oss


class Activation(StrEnum):
    """The element-wise function of the MLP."""

    GELU_TANH = "gelu_tanh"
    GELU_ERF = "gelu_erf"
    GELU_SIGMOID = "gelu_sigmoid"  # x sigmoid(1.702 x)
    RELU = "relu"
    SQUARED_RELU = "squared_relu"
    SILU = "silu"
    IDENTITY = "identity"


_GLU = {
    GluActivation.GEGLU: Activation.GELU_ERF,
    GluActivation.GEGLU_TANH: Activation.GELU_TANH,
    GluActivation.LIGLU: Activation.IDENTITY,
    GluActivation.REGLU: Activation.RELU,
    GluActivation.SWIGLU: Activation.SILU,
    GluActivation.QUICK_GEGLU: Activation.GELU_SIGMOID,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Shape of the network."""

    num_layers: int = flag(help="transformer layers in the whole model")
    hidden_size: int = flag(help="width of the residual stream")
    num_attention_heads: int = flag(help="attention (query) heads in the whole model")
    ffn_hidden_size: int | None = flag(
        None,
        help="MLP width; when not set 4 x hidden-size, and for --swiglu 8/3 x hidden-size "
        "rounded down to a multiple of 64",
    )
    kv_channels: int | None = flag(
        None, help="width of one attention head; when not set hidden-size / num-attention-heads"
    )
    num_query_groups: int | None = flag(
        None,
        help="key/value heads: 1 is multi-query, num-attention-heads (or not set) multi-head; this "
        "spelling needs --group-query-attention beside it, as in Megatron-LM",
        aliases=("--num-key-value-heads",),
    )
    position_embedding_type: PositionEmbedding = flag(
        PositionEmbedding.LEARNED,
        help="learned table, rotary, ALiBi, relative as in T5, or no positions",
        values={"absolute": "learned_absolute", "rotary": "rope"},
    )
    max_position_embeddings: int | None = flag(
        None, help="rows of the learned position table, in tokens; when not set the seq-length"
    )
    rotary_base: float = flag(
        10000.0, help="base of the rotary frequencies", aliases=("--rope-theta",)
    )
    rotary_percent: float = flag(1.0, help="share of each head that rotates, 0 to 1")
    rotary_seq_len_interpolation_factor: float | None = flag(
        None, help="divide every position by this before rotating (arXiv 2306.15595)"
    )
    use_rope_scaling: bool = flag(
        False, help="slow down the slow rotary frequencies as Llama 3.1 does, for longer sequences"
    )
    rope_scaling_factor: float = flag(
        8.0, help="with --use-rope-scaling, by how much the slowest frequencies are divided"
    )
    rope_scaling_low_freq_factor: float = flag(
        1.0,
        help="with --use-rope-scaling, frequencies of fewer turns than this over "
        "rope-scaling-original-length are divided in full",
    )
    rope_scaling_high_freq_factor: float = flag(
        4.0,
        help="with --use-rope-scaling, frequencies of more turns than this over "
        "rope-scaling-original-length stay as they are",
    )
    rope_scaling_original_length: int = flag(
        8192, help="with --use-rope-scaling, tokens of the sequences that were trained on before"
    )
    rope_type: RopeType = flag(
        RopeType.ROPE,
        help="rotary frequencies as they are, or scaled as YaRN does, for longer sequences (arXiv "
        "2309.00071)",
    )
    rotary_scaling_factor: float = flag(
        1.0,
        help="with --rope-type yarn, how many times longer sequences are than those that were "
        "trained on before",
        aliases=("--yarn-rotary-scaling-factor",),
    )
    yarn_original_max_position_embeddings: int = flag(
        4096, help="with --rope-type yarn, tokens of the sequences that were trained on before"
    )
    yarn_beta_fast: float = flag(
        32.0,
        help="with --rope-type yarn, frequencies of more turns than this over "
        "yarn-original-max-position-embeddings stay as they are",
    )
    yarn_beta_slow: float = flag(
        1.0, help="with --rope-type yarn, frequencies of fewer turns than this are divided in full"
    )
    yarn_correction_range_round_to_int: bool = flag(
        True,
        help="with --rope-type yarn, begin and end the range between both at whole channels",
    )
    mscale: float = flag(
        1.0,
        help="with --rope-type yarn, queries and keys are multiplied by 0.1 mscale ln(factor) + 1",
        aliases=("--yarn-mscale",),
    )
    mscale_all_dim: float = flag(
        0.0,
        help="with --rope-type yarn, and divided by the same with this number for mscale",
        aliases=("--yarn-mscale-all-dim",),
    )
    no_rope_freq: str | None = flag(
        None,
        help="layers that do not rotate queries and keys: N for the last of every N, or a list of "
        "0 and 1 for all layers, in which 1 does not rotate, such as ([0]*3+[1])*9, as in SmolLM3",
    )
    normalization: Normalization = flag(
        Normalization.LAYER_NORM,
        help="kind of normalisation",
        values={"layernorm": "LayerNorm", "rmsnorm": "RMSNorm"},
    )
    layernorm_epsilon: float = flag(
        1e-5, help="added to the variance in a norm", aliases=("--norm-epsilon",)
    )
    norm_placement: NormPlacement = flag(
        NormPlacement.BEFORE,
        help="where the norms of a block stand: before attention and MLP, after them and before "
        "the residual is added (as in OLMo 2), or both (as in Gemma 2)",
    )
    apply_residual_connection_post_layernorm: bool = flag(
        False, help="take the residual after the norm, as the original BERT does"
    )
    use_parallel_residual: bool = flag(
        False,
        help="attention and MLP side by side, both from the block's input, as in GPT-NeoX",
        aliases=("--gpt-j-residual",),
    )
    embed_layernorm: bool = flag(False, help="normalise the word embedding (as BLOOM does)")
    qk_layernorm: bool = flag(
        False, help="normalise every query and key over its head before it rotates, as in Qwen3"
    )
    qk_layernorm_scope: QkNormScope = flag(
        QkNormScope.HEAD,
        help="with --qk-layernorm, the channels that are normalised together: those of a head, or "
        "of all heads of a token, as in OLMo 2",
    )
    softmax_scale: float | None = flag(
        None,
        help="factor of the scores of attention; when not set 1 / sqrt(width of a head)",
    )
    embedding_multiplier: float = flag(
        1.0,
        help="factor of the word embedding, rounded to the dtype of the model, as in Granite and "
        "Gemma",
    )
    residual_multiplier: float = flag(
        1.0,
        help="factor of what attention and the MLP add to the residual stream, as in Granite",
    )
    attention_soft_cap: float | None = flag(
        None,
        help="bound c of scores of attention x, which become c tanh(x / c), as in Gemma 2; all "
        "scores of a layer are in memory then",
    )
    logit_soft_cap: float | None = flag(None, help="the same of logits")
    logit_divisor: float = flag(1.0, help="number that divides all logits, as in Granite")
    sliding_window: int | None = flag(
        None,
        help="tokens that a token sees, itself and those just before it; when not set all before",
    )
    window_attn_skip_freq: str | None = flag(
        None,
        help="layers that --sliding-window does not hold for: N for the last of every N, or a list "
        "of 0 and 1 for all layers, in which 1 has the window, as in Megatron-LM",
    )
    window_rotary_base: float | None = flag(
        None,
        help="base of the rotary frequencies of layers with --sliding-window, which are then not "
        "scaled, as in Gemma 3; when not set they rotate as all layers do",
    )
    softmax_type: SoftmaxType = flag(
        SoftmaxType.VANILLA,
        help="scores beside those of the keys, whose share of a row's probability goes nowhere: "
        "none, 0 (off-by-one), or one that each head learns, a sink (learnable)",
    )
    swiglu: bool = flag(False, help="SwiGLU in the MLP; the same as --glu-activation swiglu")
    glu_activation: GluActivation | None = flag(None, help="gated linear unit in the MLP")
    glu_linear_offset: float = flag(
        0.0, help="added to what the gate of a gated unit multiplies, as 1 in gpt-oss"
    )
    activation_func_clamp_value: float | None = flag(
        None,
        help="bound of what enters a gated unit, as 7 in gpt-oss: the gate is at most so large, "
        "the other half lies between it and its negative",
    )
    squared_relu: bool = flag(False, help="squared ReLU in the MLP (arXiv 2109.08668)")
    relu: bool = flag(False, help="ReLU in the MLP, as in OPT")
    openai_gelu: bool = flag(False, help="tanh form of GELU, which is also the default here")
    onnx_safe: bool = flag(False, help="exact (erf) form of GELU")
    add_bias_linear: bool = flag(
        True, help="biases in the linear layers", off=("--disable-bias-linear",)
    )
    add_qkv_bias: bool = flag(
        False, help="a bias in the query/key/value projection even without the others"
    )
    untie_embeddings_and_output_weights: bool = flag(
        False, help="give the output projection weights of its own"
    )
    hidden_dropout: float = flag(0.1, help="dropout before each residual addition, 0 to 1")
    attention_dropout: float = flag(0.1, help="dropout on attention probabilities, 0 to 1")
    init_method_std: float = flag(0.02, help="standard deviation of initial weights")
    use_mup: bool = flag(
        False,
        help="muP (arXiv 2203.03466): learning rates, initial values and factors of a model of "
        "--mup-base-hidden-size serve this wider one",
    )
    mup_base_hidden_size: int | None = flag(
        None, help="hidden size of that model; when not set the one of this model"
    )
    mup_base_head_dim: float | None = flag(
        None, help="width of its heads, at which scores have their usual factor 1 / sqrt(width)"
    )
    mup_attn_scale_power: float = flag(
        1.0, help="power of the width of a head that divides scores under muP"
    )
    mup_embedding_mult: float = flag(1.0, help="factor of the word embedding under muP")
    mup_output_mult: float = flag(
        1.0, help="factor of all logits under muP; 1 stands for its hidden size over this one's"
    )
    output_layer_init_method_std: float | None = flag(
        None,
        help="standard deviation of initial weights at residual outputs; when not set "
        "init-method-std / sqrt(2 num-layers)",
    )
    init_method_xavier_uniform: bool = flag(False, help="draw initial weights from Xavier uniform")
    num_experts: int | None = flag(
        None,
        help="MLPs in a layer, of which each token takes moe-router-topk; not set or 1: one "
        "that all tokens take",
    )
    moe_layer_freq: str = flag(
        EVERY_LAYER,
        help="layers that have experts, while the others have an MLP: N for every N-th from the "
        "first on, or a list of 0 and 1 for all layers, such as ([0]*1+[1]*26)",
    )
    expert_interval: int | None = flag(
        None,
        help="every N-th layer has experts, the N-th as the first of them, as Megatron-DeepSpeed "
        "counts; not set: see moe-layer-freq",
    )
    moe_router_topk: int = flag(2, help="experts that each token takes", aliases=("--topk",))
    moe_ffn_hidden_size: int | None = flag(
        None, help="width of an expert; when not set as the MLP of a dense model"
    )
    moe_shared_expert_intermediate_size: int | None = flag(
        None,
        help="width of an MLP that all tokens take beside their experts, as in DeepSeek-V3; not "
        "set: none",
    )
    mlp_type: MlpType = flag(
        MlpType.STANDARD,
        help="residual: a layer with experts has an MLP of the dense width too, and both outputs "
        "are added up by two shares, as in DeepSpeed-MoE",
    )
    moe_shared_expert_gate: bool = flag(
        False,
        help="multiply the output of the shared expert by a sigmoid of the token, as in Qwen2-MoE",
    )
    moe_router_add_bias: bool = flag(
        False, help="a bias for each expert in the router's scores, as in gpt-oss"
    )
    moe_router_pre_softmax: bool = flag(
        False,
        help="shares of a token's experts are their probabilities among all experts, which sum to "
        "less than 1; otherwise among those that it takes, as in Mixtral",
    )
    moe_router_score_function: RouterScoreFunction = flag(
        RouterScoreFunction.SOFTMAX,
        help="what makes shares of a router's scores; sigmoid: each expert's own, scaled to a sum "
        "of 1 over those that a token takes if it takes several",
    )
    moe_router_topk_scaling_factor: float = flag(
        1.0, help="factor of all shares, as in DeepSeek-V3"
    )
    moe_router_num_groups: int | None = flag(
        None,
        help="equal groups of experts, of which a token takes those of the best "
        "moe-router-group-topk alone, as in DeepSeek-V3; when not set of all",
    )
    moe_router_group_topk: int | None = flag(
        None, help="groups whose experts a token may take; a group's score is the sum of its best"
    )
    moe_router_enable_expert_bias: bool = flag(
        False,
        help="experts are chosen by their sigmoid and a bias, which each step moves towards equal "
        "loads: balance without a loss (arXiv 2412.19437, section 2.1.2)",
    )
    moe_router_bias_update_rate: float = flag(
        1e-3, help="how far a step moves the biases of experts"
    )
    moe_expert_capacity_factor: float | None = flag(
        None,
        help="most tokens of a sequence that an expert takes, over those that it would take if all "
        "experts were alike; what is more is dropped; not set: none is",
        aliases=("--moe-train-capacity-factor",),
    )
    moe_eval_capacity_factor: float | None = flag(
        None, help="the same in evaluations; when not set as in training"
    )
    moe_min_capacity: int = flag(
        1, help="least number of tokens of a sequence that a capacity comes to"
    )
    moe_token_drop_policy: TokenDropPolicy = flag(
        TokenDropPolicy.PROBS,
        help="tokens that an expert takes up to its capacity: those with the largest shares "
        "(probs), or the first in the sequence (position)",
    )
    moe_router_load_balancing_type: LoadBalancing = flag(
        LoadBalancing.NONE,
        help="what keeps experts equally busy: a loss of each sequence by itself (seq_aux_loss; "
        "arXiv 2412.19437, eq. 17), or what depends on the layout: a loss of each micro-batch "
        "(aux_loss), of all replicas' so far (global_aux_loss), or a choice for all tokens of a "
        "rank's micro-batch together (sinkhorn)",
    )
    moe_aux_loss_coeff: float = flag(
        0.0, help="weight of the loss that balances experts", aliases=("--moe-loss-coeff",)
    )
    moe_z_loss_coeff: float = flag(
        0.0, help="weight of the loss that keeps the router's scores small (arXiv 2202.08906)"
    )

    def __post_init__(self) -> None:
        raise_all(self._problems())

    def _problems(self) -> Iterator[ConfigError]:
        for name in ("num_layers", "hidden_size", "num_attention_heads"):
            yield from _positive(name, getattr(self, name))
        for name in (
            "ffn_hidden_size",
            "kv_channels",
            "num_query_groups",
            "max_position_embeddings",
            "sliding_window",
            "rope_scaling_original_length",
            "yarn_original_max_position_embeddings",
            "num_experts",
            "moe_ffn_hidden_size",
            "moe_shared_expert_intermediate_size",
            "expert_interval",
        ):
            if getattr(self, name) is not None:
                yield from _positive(name, getattr(self, name))
        for name in (
            "rotary_base",
            "rope_scaling_factor",
            "rotary_scaling_factor",
            "layernorm_epsilon",
            "init_method_std",
        ):
            value = getattr(self, name)
            yield from check_field(
                0 < value < math.inf,
                name,
                value,
                problem="it is not a positive number",
                fix=f"use a number above 0, such as the default {default_of(ModelConfig, name)}",
            )
        std = self.output_layer_init_method_std
        if std is not None:
            yield from check_field(
                0 < std < math.inf,
                "output_layer_init_method_std",
                std,
                problem="it is not a positive number",
                fix="use a number above 0, or leave it out",
            )
            if self.init_method_xavier_uniform:
                yield ConfigError(
                    "a standard deviation was given to weights that are drawn from Xavier uniform",
                    found=f"--output-layer-init-method-std {std}, --init-method-xavier-uniform",
                    fix="leave one of the two out",
                )
        for name in ("hidden_dropout", "attention_dropout"):
            yield from check_field(
                0 <= getattr(self, name) < 1,
                name,
                getattr(self, name),
                problem="a dropout probability is outside [0, 1)",
                fix="use a number from 0 up to, not including, 1",
            )
        yield from self._head_problems()
        yield from self._activation_problems()
        if self.position_embedding_type is PositionEmbedding.ROPE and not (
            0 < self.rotary_percent <= 1
        ):
            yield ConfigError(
                "the rotating share of a head is outside (0, 1]",
                found=f"--rotary-percent {self.rotary_percent}",
                fix="use 1.0 for LLaMA, 0.25 for GPT-NeoX",
            )
        yield from self._rope_scaling_problems()
        yield from self._yarn_problems()
        yield from self._layer_problems()
        yield from block_problems(self)
        yield from mup_problems(self)
        yield from expert_problems(self)
        if self.use_parallel_residual and self.apply_residual_connection_post_layernorm:
            yield ConfigError(
                "with attention and MLP side by side there is no one norm to take a residual after",
                found="--use-parallel-residual, --apply-residual-connection-post-layernorm",
                fix="keep one of the two",
            )

    def _rope_scaling_problems(self) -> Iterator[ConfigError]:
        factor = self.rotary_seq_len_interpolation_factor
        if factor is not None:
            yield from check_field(
                0 < factor < math.inf,
                "rotary_seq_len_interpolation_factor",
                factor,
                problem="it is not a positive number",
                fix="use the new length divided by the one that was trained on, such as 2",
            )
        asked = [
            flag
            for flag, on in (
                ("--use-rope-scaling", self.use_rope_scaling),
                (f"--rotary-seq-len-interpolation-factor {factor}", factor is not None),
                (f"--rope-type {self.rope_type}", self.rope_type is RopeType.YARN),
            )
            if on
        ]
        if asked and self.position_embedding_type is not PositionEmbedding.ROPE:
            yield ConfigError(
                "rotary frequencies were to be scaled in a model that does not rotate",
                found=f"{', '.join(asked)}, "
                f"--position-embedding-type {self.position_embedding_type}",
                fix=f"add --position-embedding-type rope, or drop {asked[0]}",
            )
        if len(asked) > 1:
            yield ConfigError(
                "rotary frequencies were to be scaled in two ways",
                found=", ".join(asked),
                fix=f"keep one, for example {asked[0]}",
            )
        low, high = self.rope_scaling_low_freq_factor, self.rope_scaling_high_freq_factor
        if not 0 < low < high < math.inf:
            yield ConfigError(
                "the bounds between slow and fast rotary frequencies are not in order",
                found=f"--rope-scaling-low-freq-factor {low}, "
                f"--rope-scaling-high-freq-factor {high}",
                fix="use 1 and 4, as Llama 3.1 does",
            )

    def _yarn_problems(self) -> Iterator[ConfigError]:
        slow, fast = self.yarn_beta_slow, self.yarn_beta_fast
        if not 0 < slow < fast < math.inf:
            yield ConfigError(
                "the bounds between slow and fast rotary frequencies are not in order",
                found=f"--yarn-beta-slow {slow}, --yarn-beta-fast {fast}",
                fix="use 1 and 32, as YaRN's authors do",
            )
        for name in ("mscale", "mscale_all_dim"):
            value = getattr(self, name)
            yield from check_field(
                0 <= value < math.inf,
                name,
                value,
                problem="it is not a number from 0 up",
                fix="use 1 for --mscale and 0 for --mscale-all-dim, or leave both out",
            )

    def _layer_problems(self) -> Iterator[ConfigError]:
        bound = self.activation_func_clamp_value
        if not self.has_plain_unit and self.glu is None:
            yield ConfigError(
                "an offset or a bound was given for a gated unit, and the MLP has none",
                found=f"--glu-linear-offset {self.glu_linear_offset}, "
                f"--activation-func-clamp-value {bound}",
                fix="add --glu-activation quick_geglu, or leave both out",
            )
        if bound is not None:
            yield from check_field(
                0 < bound < math.inf,
                "activation_func_clamp_value",
                bound,
                problem="it is not a positive number",
                fix="use a number above 0, such as 7",
            )
        if self.window_attn_skip_freq is not None:
            if self.sliding_window is None:
                yield ConfigError(
                    "some layers were to have no window in a model without windows",
                    found=f"--window-attn-skip-freq {self.window_attn_skip_freq} without "
                    "--sliding-window",
                    fix="add --sliding-window, or drop --window-attn-skip-freq",
                )
            try:
                _ = self.layers_without_window
            except ConfigError as error:
                yield error
        if self.no_rope_freq is None:
            return
        if self.position_embedding_type is not PositionEmbedding.ROPE:
            yield ConfigError(
                "some layers were not to rotate in a model that does not rotate",
                found=f"--no-rope-freq {self.no_rope_freq}, "
                f"--position-embedding-type {self.position_embedding_type}",
                fix="add --position-embedding-type rope, or drop --no-rope-freq",
            )
        try:
            _ = self.layers_without_rotation
        except ConfigError as error:
            yield error

    def _head_problems(self) -> Iterator[ConfigError]:
        heads, hidden = self.num_attention_heads, self.hidden_size
        if self.kv_channels is None and heads > 0 and hidden > 0 and hidden % heads:
            yield ConfigError(
                "the hidden size does not divide into attention heads",
                found=f"--hidden-size {hidden}, --num-attention-heads {heads}",
                fix=f"use --hidden-size {hidden // heads * heads or heads} or "
                f"{(hidden // heads + 1) * heads}, or give --kv-channels",
            )
        groups = self.num_query_groups
        if groups is not None and groups > 0 and heads > 0 and heads % groups:
            yield ConfigError(
                "the query heads cannot be shared out evenly over the key/value heads",
                found=f"--num-attention-heads {heads}, --num-query-groups {groups}",
                fix=f"use one of {_divisors(heads)} query groups",
            )

    def _activation_problems(self) -> Iterator[ConfigError]:
        chosen = [
            flag
            for flag, on in (
                ("--swiglu", self.swiglu),
                (f"--glu-activation {self.glu_activation}", self.glu_activation is not None),
                ("--squared-relu", self.squared_relu),
                ("--relu", self.relu),
                ("--openai-gelu", self.openai_gelu),
                ("--onnx-safe", self.onnx_safe),
            )
            if on
        ]
        if len(chosen) > 1 and not (self.swiglu and self.glu_activation == GluActivation.SWIGLU):
            yield ConfigError(
                "more than one activation was asked for",
                found=", ".join(chosen),
                fix=f"keep one, for example {chosen[0]}",
            )

    @property
    def glu(self) -> GluActivation | None:
        """The gated unit of the MLP, or None for a plain MLP."""
        return GluActivation.SWIGLU if self.swiglu else self.glu_activation

    @property
    def activation(self) -> Activation:
        """The element-wise function of the MLP; of its gate where there is one."""
        if self.glu is not None:
            return _GLU[self.glu]
        if self.squared_relu:
            return Activation.SQUARED_RELU
        if self.relu:
            return Activation.RELU
        return Activation.GELU_ERF if self.onnx_safe else Activation.GELU_TANH

    @property
    def has_plain_unit(self) -> bool:
        """Whether a gated unit is the product of its halves, without offset and bound."""
        return self.glu_linear_offset == 0 and self.activation_func_clamp_value is None

    @property
    def has_bounded_unit(self) -> bool:
        """Whether what enters a gated unit has a bound."""
        return self.activation_func_clamp_value is not None

    @property
    def ffn_width(self) -> int:
        """Width of the MLP's middle; with a gated unit, of each of its two halves."""
        if self.ffn_hidden_size is not None:
            return self.ffn_hidden_size
        if self.swiglu:  # Megatron-LM's rule: 2/3 keeps the parameter count of the plain MLP
            return max(int(4 * self.hidden_size * 2 / 3) // 64 * 64, 64)
        return 4 * self.hidden_size

    @property
    def has_experts(self) -> bool:
        """Whether there are layers with several MLPs, of which each token uses some."""
        return self.num_experts is not None and self.num_experts > 1

    @property
    def expert_layers(self) -> tuple[bool, ...]:
        """For each layer, whether it has experts."""
        layers, interval = self.num_layers, self.expert_interval
        if not self.has_experts:
            return (False,) * layers
        if interval is not None:
            return tuple(number % interval == 0 for number in range(1, layers + 1))
        return layers_of_pattern(self.moe_layer_freq, layers)

    @property
    def layers_without_rotation(self) -> tuple[int, ...]:
        """Numbers of the layers that do not rotate queries and keys though the others do."""
        if self.no_rope_freq is None:
            return ()
        pattern = layers_of_pattern(
            self.no_rope_freq, self.num_layers, flag="--no-rope-freq", last=True
        )
        return tuple(layer for layer, is_without in enumerate(pattern) if is_without)

    @property
    def rotary_magnitude(self) -> float:
        """The factor of rotated queries and keys, 1 but for YaRN (arXiv 2309.00071).

        There scores are divided by a temperature t with sqrt(1 / t) = 0.1 ln(s) + 1 for the factor
        s (eq. 22), of which queries and keys take a half each. DeepSeek-V2 gives the logarithm a
        weight, and divides by the same with another weight (arXiv 2405.04434, section 3.1.4).
        """
        if self.rope_type is not RopeType.YARN or self.rotary_scaling_factor <= 1:
            return 1.0
        growth = 0.1 * math.log(self.rotary_scaling_factor)
        return (growth * self.mscale + 1) / (growth * self.mscale_all_dim + 1)

    @property
    def has_sinks(self) -> bool:
        """Whether attention has scores beside those of its keys."""
        return self.softmax_type is not SoftmaxType.VANILLA

    @property
    def layers_without_window(self) -> tuple[int, ...]:
        """Numbers of the layers in which a token sees all before it though there is a window."""
        text = self.window_attn_skip_freq
        if text is None:
            return ()
        pattern = layers_of_pattern(
            text, self.num_layers, flag="--window-attn-skip-freq", last=True
        )
        skips = text.strip().isdecimal()  # N skips, a list says where the window is
        return tuple(layer for layer, is_one in enumerate(pattern) if is_one == skips)

    @property
    def expert_width(self) -> int:
        """Width of the middle of one expert; with a gated unit, of each of its two halves."""
        return self.moe_ffn_hidden_size or self.ffn_width

    @property
    def mlp_widths(self) -> dict[str, int]:
        """Widths of the middles of all kinds of MLPs, by the flag of each."""
        widths = {}
        if not all(self.expert_layers):
            widths["--ffn-hidden-size"] = self.ffn_width
        if not self.has_experts:
            return widths
        widths["--moe-ffn-hidden-size"] = self.expert_width
        if (shared := self.shared_expert_width) is not None:
            residual = self.mlp_type is MlpType.RESIDUAL
            flag = "ffn-hidden-size" if residual else "moe-shared-expert-intermediate-size"
            widths[f"--{flag}"] = shared
        return widths

    @property
    def shared_expert_width(self) -> int | None:
        """Width of the MLP beside the experts of a layer; None: there is none."""
        if self.mlp_type is MlpType.RESIDUAL:
            return self.ffn_width
        return self.moe_shared_expert_intermediate_size

    @property
    def balance_weight(self) -> float:
        """Weight of the loss that balances experts, 0 if there is none."""
        balanced = self.moe_router_load_balancing_type.is_loss
        return self.moe_aux_loss_coeff if self.has_experts and balanced else 0.0

    @property
    def has_router_loss(self) -> bool:
        """Whether routers add a loss of their own to that of the task."""
        return self.has_experts and (self.balance_weight > 0 or self.moe_z_loss_coeff > 0)

    @property
    def width_multiplier(self) -> float:
        """How many times wider this model is than the one whose settings it has; 1 without muP."""
        base = self.mup_base_hidden_size
        return 1.0 if base is None else self.hidden_size / base

    @property
    def matrix_init_std(self) -> float:
        """Standard deviation of initial weights of layers, but for `residual_init_std`."""
        return self.init_method_std / math.sqrt(self.width_multiplier)

    @property
    def embedding_factor(self) -> float:
        """The factor of the word embedding."""
        return self.embedding_multiplier * self.mup_embedding_mult

    @property
    def logit_denominator(self) -> float:
        """The number that divides all logits."""
        given = self.mup_output_mult
        return self.logit_divisor * (self.width_multiplier if given == 1.0 else 1 / given)

    @property
    def residual_init_std(self) -> float:
        """Standard deviation of initial weights that write to the residual stream.

        Unless it is given, the others' divided by sqrt(2 layers), so that the stream's variance
        does not grow with depth (GPT-2, Radford et al. 2019, section 2.3).
        """
        scaled = self.matrix_init_std / math.sqrt(2 * self.num_layers)
        given = self.output_layer_init_method_std
        return scaled if given is None else given

    @property
    def head_width(self) -> int:
        """Width of one attention head."""
        return self.kv_channels or self.hidden_size // self.num_attention_heads

    @property
    def score_scale(self) -> float:
        """The factor of the scores of attention; that of Vaswani et al. unless it is given."""
        if self.use_mup:  # 1 / d, or what is 1 / sqrt(d) at the width of the other model's heads
            base = 1.0 if self.mup_base_head_dim is None else math.sqrt(self.mup_base_head_dim)
            return float(base / self.head_width**self.mup_attn_scale_power)
        return 1 / math.sqrt(self.head_width) if self.softmax_scale is None else self.softmax_scale

    @property
    def query_factor(self) -> float:
        """The factor of queries with which 1 / sqrt(d) times a score is `score_scale` times it."""
        is_usual = self.softmax_scale is None and not self.use_mup
        return 1.0 if is_usual else self.score_scale * self.head_width**0.5

    @property
    def of_windows(self) -> "ModelConfig | None":
        """The same with the rotation of layers with a window; None where it is that of all."""
        base = self.window_rotary_base
        if base is None:
            return None
        return replace(
            self,
            rotary_base=base,
            window_rotary_base=None,
            rotary_seq_len_interpolation_factor=None,
            use_rope_scaling=False,
            rope_type=RopeType.ROPE,
        )

    @property
    def query_groups(self) -> int:
        """Number of key/value heads."""
        return self.num_query_groups or self.num_attention_heads

    @property
    def has_qkv_bias_alone(self) -> bool:
        """Whether the query/key/value projection has a bias and the other matrices have none."""
        return self.add_qkv_bias and not self.add_bias_linear

    @property
    def tied(self) -> bool:
        """Whether the output projection is the word embedding."""
        return not self.untie_embeddings_and_output_weights

    def meaning(self) -> dict[str, JsonValue]:
        """Return the fields that affect what is computed, as plain values with defaults resolved.

        Two configs of equal meaning are the same network, however their flags were spelled. Fields
        that do not apply (frequencies of a model without rotation) are left out.
        """
        fields = to_plain(self)
        for spelling in (*_ACTIVATION_FLAGS, *_LAYERS_APART, *_MUP_FLAGS):
            del fields[spelling]
        for name in _LAYERS_APART.values():
            if getattr(self, name):
                fields[name] = [*getattr(self, name)]
        fields |= {
            "ffn_hidden_size": self.ffn_width,
            "kv_channels": self.head_width,
            "num_query_groups": self.query_groups,
            "softmax_scale": self.score_scale,
            "embedding_multiplier": self.embedding_factor,
            "logit_divisor": self.logit_denominator,
            "add_qkv_bias": self.add_qkv_bias or self.add_bias_linear,
            "glu_activation": None if self.glu is None else self.glu.value,
            "activation": self.activation.value,
        }
        if self.position_embedding_type is not PositionEmbedding.ROPE:
            fields = {n: v for n, v in fields.items() if not n.startswith(("rotary_", "rope_"))}
        elif not self.use_rope_scaling:
            fields = {n: v for n, v in fields.items() if not n.startswith("rope_scaling_")}
        if self.rope_type is RopeType.ROPE:
            fields = {n: v for n, v in fields.items() if n not in _YARN_FLAGS}
        return self._meaning_of_experts(fields)

    def _meaning_of_experts(self, fields: dict[str, JsonValue]) -> dict[str, JsonValue]:
        if not self.has_experts:
            return {n: v for n, v in fields.items() if n not in _EXPERT_FLAGS}
        for name in (*_ROUTER_TRAINING, *_LAYER_FLAGS):
            del fields[name]
        if all(self.expert_layers) and self.mlp_type is MlpType.STANDARD:
            del fields["ffn_hidden_size"]
        layers: list[JsonValue] = [*self.expert_layers]
        return fields | {"moe_ffn_hidden_size": self.expert_width, "expert_layers": layers}

    def fields_that_differ(self, other: "ModelConfig") -> list[str]:
        """Return the names of the fields that make `other` a different network."""
        own_meaning, other_meaning = self.meaning(), other.meaning()
        names = {
            n
            for n in own_meaning.keys() | other_meaning.keys()
            if own_meaning.get(n) != other_meaning.get(n)
        }
        if names & {"activation", "glu_activation"}:
            names |= set(_ACTIVATION_FLAGS)
        if names & {"softmax_scale", "embedding_multiplier", "logit_divisor"}:
            names |= set(_MUP_FLAGS)
        if names & {"ffn_hidden_size", "moe_ffn_hidden_size"}:
            names |= {"ffn_hidden_size", "moe_ffn_hidden_size"}
        if "expert_layers" in names:
            names |= set(_LAYER_FLAGS)
        names |= {spelling for spelling, name in _LAYERS_APART.items() if name in names}
        own_fields, other_fields = to_plain(self), to_plain(other)
        return [
            name
            for name in sorted(names & own_fields.keys())
            if own_fields[name] != other_fields[name]
        ]


# Patterns of layers, and the numbers of the layers that they stand for.
_LAYERS_APART = {
    "no_rope_freq": "layers_without_rotation",
    "window_attn_skip_freq": "layers_without_window",
}
_YARN_FLAGS = (
    *("rotary_scaling_factor", "yarn_original_max_position_embeddings", "yarn_beta_fast"),
    *("yarn_beta_slow", "yarn_correction_range_round_to_int", "mscale", "mscale_all_dim"),
)
_ACTIVATION_FLAGS = ("swiglu", "squared_relu", "relu", "openai_gelu", "onnx_safe")
# Used in training only: they do not change the output for given weights.
_ROUTER_TRAINING = (
    *("moe_router_load_balancing_type", "moe_aux_loss_coeff", "moe_z_loss_coeff"),
    *("moe_router_bias_update_rate", "moe_expert_capacity_factor", "moe_eval_capacity_factor"),
    *("moe_min_capacity", "moe_token_drop_policy"),
)
_MUP_FLAGS = ("use_mup", *MUP_DEFAULTS)
_LAYER_FLAGS = ("moe_layer_freq", "expert_interval")
_EXPERT_FLAGS = (
    *("num_experts", "moe_router_topk", "moe_ffn_hidden_size", "moe_router_pre_softmax"),
    "moe_router_add_bias",
    *("moe_router_score_function", "moe_router_topk_scaling_factor"),
    *("moe_router_num_groups", "moe_router_group_topk", "moe_router_enable_expert_bias"),
    *("moe_shared_expert_intermediate_size", "moe_shared_expert_gate", "mlp_type"),
    *_LAYER_FLAGS,
    *_ROUTER_TRAINING,
)


def _positive(name: str, value: int) -> Iterator[ConfigError]:
    yield from check_field(
        value > 0, name, value, problem="a size is not positive", fix="use a whole number above 0"
    )


def _divisors(number: int) -> str:
    return ", ".join(str(d) for d in range(1, number + 1) if number % d == 0)
