"""Parameters, floating-point operations and bytes of a GPT, from its config alone.

Nothing is built. The parameter count is exact; FLOPs follow a named convention; bytes are an
estimate for people and preflight, which leaves out what a framework and fragmentation add.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import pairwise

from megatron.config.activations import ActivationPolicy, RecomputeModule
from megatron.config.blocks import QkNormScope
from megatron.config.experts import MlpType
from megatron.config.model import Activation, ModelConfig, Normalization, PositionEmbedding
from megatron.config.models.vision import VisionConfig, VisionHead
from megatron.config.precision import PrecisionConfig
from megatron.model.activations import plan_groups
from megatron.model.mlp import has_fused_unit
from megatron.model.specs import TokenFlops, VocabSize
from megatron.mpu.linear_cross_entropy import chunk_rows

FLOPS_CONVENTION = "6 N + 12 L a d s per token (PaLM, arXiv 2204.02311, appendix B)"
_NOTHING = ActivationPolicy()  # is recomputed


def parameter_count(
    config: ModelConfig, vocab_rows: int, seq_length: int, *, active: bool = False
) -> int:
    """Return the number of parameters of the whole model with `vocab_rows` rows of vocabulary.

    Give the true size for the number that papers quote, the padded one for what is stored.
    `seq_length` is the size of a position table that the config leaves open. With `active` only
    those experts count that one token takes.
    """
    head = 0 if config.tied else vocab_rows * config.hidden_size
    blocks = sum(
        _block_parameters(config, experts=experts, active=active)
        for experts in config.expert_layers
    )
    return (
        _embedding_parameters(config, vocab_rows, seq_length)
        + blocks
        + norm_parameters(config)
        + head
    )


def expert_parameters(config: ModelConfig) -> int:
    """Return those parameters of the whole model that expert parallelism shares out."""
    return _expert_parameters(config, config.expert_layers)


def _expert_parameters(config: ModelConfig, layers: Iterable[bool]) -> int:
    of_one = _mlp_weights(config, config.expert_width) + _mlp_biases(config, config.expert_width)
    return sum(layers) * (config.num_experts or 1) * of_one


def flops_per_token(
    config: ModelConfig,
    vocab_padded: int,
    seq_length: int,
    *,
    recompute: ActivationPolicy = _NOTHING,
    virtual_stages: int = 1,
) -> TokenFlops:
    """Return the FLOPs of one token of a GPT; none where `vocab_padded` is 0 for a head.

    Convention: PaLM appendix B (Chowdhery et al. 2022, arXiv 2204.02311), 6 N + 12 L a d s, with
    N the weights that multiply something: embedding look-ups are left out, the head over the
    padded vocabulary is in, and so are the router and those experts that a token takes. Two per
    multiply-add; backward is twice forward. Attention is counted in full, although the causal half
    is never needed. Norms, softmax and activations do not count.

    Args:
        recompute: what is computed again. Of a block all is counted, also its last product, which
            torch leaves out of the second pass where nothing needs it.
        virtual_stages: of the whole pipeline, each of which recomputes its own first layers; taken
            to have as many layers as each other.
    """
    layers = config.num_layers
    forward = [
        2 * block_weights(config, experts=experts, active=True) + _scores(config, seq_length)
        for experts in config.expert_layers
    ]
    head = 3 * 2 * config.hidden_size * vocab_padded
    again = 0
    cuts = [stage * layers // virtual_stages for stage in range(virtual_stages + 1)]
    for start, stop in pairwise(cuts):
        for group in plan_groups([True] * (stop - start), recompute):
            again += group.recomputed * sum(forward[start + group.start : start + group.stop])
    if RecomputeModule.CORE_ATTN in recompute.modules:
        again += layers * _scores(config, seq_length)
    if RecomputeModule.MLP in recompute.modules:
        again += 2 * sum(
            feed_forward_weights(config, experts=experts, active=True)
            for experts in config.expert_layers
        )
    model = 3 * sum(forward) + head
    masked = 3 * layers * _scores(config, seq_length) * (1 - _seen_share(config, seq_length))
    return TokenFlops(model, model - round(masked), model + again)


def bert_flops_per_token(
    config: ModelConfig,
    vocab_padded: int,
    seq_length: int,
    *,
    recompute: ActivationPolicy = _NOTHING,
    virtual_stages: int = 1,
) -> TokenFlops:
    """Return the FLOPs of one token of a BERT, whose head has one more matrix and no mask.

    The head for the order of segments looks at one token of a row and is left out.
    """
    flops = flops_per_token(
        config, vocab_padded, seq_length, recompute=recompute, virtual_stages=virtual_stages
    )
    dense = 3 * 2 * config.hidden_size**2
    return TokenFlops(flops.model + dense, flops.model + dense, flops.hardware + dense)


def vit_parameter_count(config: ModelConfig, vision: VisionConfig) -> int:
    """Return the number of parameters of a ViT, which has patches in place of words."""
    width = config.hidden_size
    patches = width * (vision.patch_values + 1)
    head = (width + 1) * vision.num_classes
    head += (width + 1) * width * (vision.vision_head is VisionHead.MLP)
    # Without words, and with a position for each patch.
    without_words = replace(
        config,
        untie_embeddings_and_output_weights=False,
        max_position_embeddings=vision.num_tokens,
    )
    rest = parameter_count(without_words, 0, vision.num_tokens)
    return patches + vision.has_class_token * width + rest + head


def vit_flops_per_token(
    config: ModelConfig,
    vision: VisionConfig,
    *,
    recompute: ActivationPolicy = _NOTHING,
    virtual_stages: int = 1,
) -> TokenFlops:
    """Return the FLOPs of one token of a ViT, which has no mask, and patches in place of words.

    The head looks at one vector of an image and is left out.
    """
    flops = flops_per_token(
        config, 0, vision.num_tokens, recompute=recompute, virtual_stages=virtual_stages
    )
    # Backward computes no gradient of the images.
    patches = 2 * 2 * config.hidden_size * vision.patch_values
    return TokenFlops(flops.model + patches, flops.model + patches, flops.hardware + patches)


def _scores(config: ModelConfig, seq_length: int) -> int:
    """Return the forward FLOPs of q k^T, and of probabilities times v, for one token."""
    return 2 * 2 * seq_length * config.num_attention_heads * config.head_width


def _seen_share(config: ModelConfig, seq_length: int) -> float:
    """Return the share of all pairs of tokens that a causal mask and a sliding window leave."""
    window = min(config.sliding_window or seq_length, seq_length)
    # Token i of the first `window` sees i tokens, and every later one `window`.
    near = (window * (window + 1) / 2 + (seq_length - window) * window) / seq_length**2
    wide = len(config.layers_without_window) / config.num_layers
    return near * (1 - wide) + wide * (seq_length + 1) / (2 * seq_length)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankShare:
    """The largest part of the model and of a batch that one rank processes."""

    tp: int = 1
    sequence_parallel: bool = False
    pp: int = 1
    cp: int = 1
    expert_ranks: int | None = None  # that hold the experts once, where tokens go to them
    expert_tp: int = 1  # of those, which share the matrices of an expert
    optimizer_shards: int = 1  # dp x cp with a distributed optimizer, else 1
    micro_batch_size: int
    seq_length: int
    policy: ActivationPolicy = _NOTHING  # of a stage, taken to be one virtual stage
    fuse_loss: bool = False
    fuse_accumulation: bool = False  # products add to the gradient buffers, that of the loss too
    fuse_gated_units: bool = True
    fuse_rope: bool = True
    fuse_dropout: bool = True
    device_type: str = "cuda"  # which decides how many logits a fused loss holds at a time
    one_pass: bool = False  # of a step: its loss may hold logits where gradients come later

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch whose hidden states the rank holds, before tp divides them."""
        return self.seq_length * self.micro_batch_size // self.cp


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """Bytes on the fullest rank, by what they are for."""

    weights: int
    gradients: int
    optimizer: int
    activations: int

    @property
    def total(self) -> int:
        """The sum of all parts."""
        return self.weights + self.gradients + self.optimizer + self.activations


def memory_bytes(
    config: ModelConfig, vocab: VocabSize, precision: PrecisionConfig, share: RankShare
) -> MemoryEstimate:
    """Estimate the bytes under Adam on the stage that needs most.

    Weights are in the model's dtype and gradients in the accumulation dtype; the optimizer keeps
    two moments, and in half precision an fp32 copy of the weights, or what bfloat16 weights lack
    of it where their gradients are in fp32. Activations are what our
    layers keep for backward (see `_block_activations`), once per microbatch in flight: `pp` on
    the first stage under 1F1B, one less on each that follows. The last also holds the logits and
    their gradient; with a fused loss the logits of a chunk of tokens, and the gradients of the
    projection (unless it adds to the buffer) and its input.
    """
    stages = (_stage_bytes(config, vocab, precision, share, stage) for stage in range(share.pp))
    return max(stages, key=lambda stage: stage.total)


def forward_bytes(
    config: ModelConfig, vocab: VocabSize, precision: PrecisionConfig, share: RankShare
) -> int:
    """Estimate the peak bytes of a forward pass that saves nothing, on the fullest rank.

    Beside the weights: the stream, and the larger of what one block computes and, on the last
    stage, of the logits [s, b, v/tp] with their softmax in fp32 or wider.
    """
    size = precision.precision.num_bytes
    tokens = share.tokens
    stream = config.hidden_size * (4 if precision.fp32_residual_connection else size)
    stream //= share.tp if share.sequence_parallel else 1
    undropped = replace(config, hidden_dropout=0.0)
    block = max(
        _block_activations(undropped, size, share, experts=experts)
        for experts in set(config.expert_layers)
    )
    scores = vocab.padded // share.tp * (size + max(size, 4))
    return tokens * (2 * stream + max(block, scores))


def _stage_bytes(
    config: ModelConfig,
    vocab: VocabSize,
    precision: PrecisionConfig,
    share: RankShare,
    stage: int,
) -> MemoryEstimate:
    first, last = stage == 0, stage == share.pp - 1
    length = -(-config.num_layers // share.pp)
    start = min(stage * length, config.num_layers - length)
    layers = config.expert_layers[start : start + length]
    parameters = sum(_block_parameters(config, experts=experts) for experts in layers)
    if first:
        parameters += _embedding_parameters(config, vocab.padded, share.seq_length)
    if last:
        parameters += norm_parameters(config)
    if last and not (first and config.tied):  # a tied last stage has a copy of the table
        parameters += vocab.padded * config.hidden_size
    experts = 0 if share.expert_ranks is None else _expert_parameters(config, layers)
    experts_of_rank = experts // (share.expert_ranks or 1)
    # Norms and row biases are whole on every rank, and negligible.
    parameters = (parameters - experts) // share.tp + experts_of_rank

    half = precision.precision.is_half
    size = precision.precision.num_bytes
    gradient_size = precision.gradient_precision.num_bytes
    state = 2 * (4 if half else size)
    if half:
        state += 2 if precision.splits_masters else 4
    tokens = share.tokens
    in_flight = share.pp - stage
    kept = [tokens * _block_activations(config, size, share, experts=experts) for experts in layers]
    stream = tokens * config.hidden_size * (4 if precision.fp32_residual_connection else size)
    stream //= share.tp if share.sequence_parallel else 1
    saved, most = _saved_bytes(share.policy, stream, kept)
    again = (_middle_again(config, size, share, experts=experts) for experts in set(layers))
    activations = (in_flight - 1) * saved + max(saved + tokens * max(again), most)
    if last:
        columns = vocab.padded // share.tp
        later = (parameters - columns * config.hidden_size) * gradient_size
        lent = later if share.one_pass and share.device_type == "cpu" else 0
        activations += _loss_bytes(config, columns, size, share, lent=lent)
    return MemoryEstimate(
        weights=parameters * size,
        gradients=parameters * gradient_size,
        optimizer=_updated(parameters, experts_of_rank, share) * state,
        activations=activations,
    )


def _saved_bytes(policy: ActivationPolicy, stream: int, kept: list[int]) -> tuple[int, int]:
    """Return bytes that a forward pass saves, and the most while a group of layers is there again.

    By then the layers behind that group have given theirs back.

    Args:
        stream: of the input of a group that is recomputed.
        kept: what each layer of the stage saves otherwise.
    """
    saved = most = 0
    for group in plan_groups([True] * len(kept), policy):
        of_layers = sum(kept[group.start : group.stop])
        if not group.offloaded:
            saved += stream if group.recomputed else of_layers
        if group.offloaded or group.recomputed:
            most = max(most, saved + of_layers)
    return saved, most


def _updated(parameters: int, experts: int, share: RankShare) -> int:
    """Return how many of a rank's parameters it updates; those of its experts have other shards."""
    if share.optimizer_shards == 1:
        return parameters
    stage = share.optimizer_shards * share.tp
    shards_of_experts = max(1, stage // (share.expert_ranks or share.tp))
    return (parameters - experts) // share.optimizer_shards + experts // shards_of_experts


def _loss_bytes(
    config: ModelConfig, columns: int, size: int, share: RankShare, *, lent: int
) -> int:
    """Return the bytes of the loss: logits and their gradient, in the model's dtype.

    A fused loss holds the logits of a chunk, in the memory that is lent where that is large enough,
    then the gradients. That of the weight is in fp32 or wider while several chunks add to it, and
    is then rounded.
    """
    tokens, elements = share.tokens, columns * config.hidden_size
    if not share.fuse_loss:
        # Logits and their gradient; with a soft cap the values of its tanh too.
        return tokens * columns * (2 if config.logit_soft_cap is None else 3) * size
    rows = chunk_rows(
        tokens,
        (columns, config.hidden_size),
        size,
        share.device_type,
        has_sum=share.fuse_accumulation,
    )
    logits = rows * columns * size
    slopes = 0 if config.logit_soft_cap is None else logits
    chunk = slopes + (logits if logits > lent else 0)
    if share.fuse_accumulation:
        return tokens * config.hidden_size * size + chunk
    summed = size if rows == tokens else max(size, 4)
    rounded = size if size < summed else 0
    of_weight = max(chunk + elements * summed, elements * (summed + rounded))
    return tokens * config.hidden_size * size + of_weight


def _block_activations(config: ModelConfig, size: int, share: RankShare, *, experts: bool) -> int:
    """Return bytes per token that one block saves for backward with fused attention.

    Fused attention saves no score matrix, so that recomputing it leaves out next to nothing. Norms
    and middles of MLPs that are recomputed are left out.

    Korthikanti et al. 2022 (arXiv 2205.05198, section 4) count the same for the plain block with
    the scores: whole on every rank are the two residuals and the two norms' outputs, 4h, and the
    dropout masks; divided by tp are q, k, v, the attention's output and its sequence-first copy,
    and the middle of the MLP before and after the activation. Under sequence parallelism the former
    are divided by tp too.
    """
    queries = config.num_attention_heads * config.head_width
    keys = config.query_groups * config.head_width
    split = (queries + 2 * keys) + 2 * queries
    rotates = config.position_embedding_type is PositionEmbedding.ROPE
    if config.qk_layernorm or (rotates and not share.fuse_rope):
        split += queries + keys  # copies; else what was projected is not kept where heads rotate
    kept = _middles(config, share)
    if RecomputeModule.MLP in share.policy.modules:
        kept = 0
    elif RecomputeModule.ACTIVATION in share.policy.modules:
        kept -= 1
    has_masks = config.hidden_dropout > 0 and not share.fuse_dropout
    masks = 2 * config.hidden_size * max(size, 4) if has_masks else 0  # as factors
    # Inputs of norms, or of branches without one before them; then outputs of norms, which are
    # those of branches with one after them.
    place, again = config.norm_placement, RecomputeModule.LAYERNORM in share.policy.modules
    stays = 2 + 2 * place.is_after + 2 * (place.is_before and not again)
    whole = stays * config.hidden_size * size + masks
    if experts:
        taken = config.moe_router_topk
        # A token's rows, sorted by expert, and what each of its experts made of it. Where experts
        # are split over tp both are whole on every rank, sequence parallelism or not; where they
        # are shared out a rank has as many as it sends, if experts are equally busy, and has them
        # a second time in the order of its experts. Shares and scores are negligible.
        gathered = 2 * taken * config.hidden_size * size
        if share.expert_ranks is not None:
            gathered = 2 * gathered * share.expert_tp // share.tp
        # What is multiplied by shares: the output of the shared expert, or both.
        if config.moe_shared_expert_gate or config.mlp_type is MlpType.RESIDUAL:
            whole += config.hidden_size * size
    else:
        gathered = 0
    split += kept * _middle_width(config, experts=experts)
    scores = _scores_kept(config, size, share) // share.tp
    whole //= share.tp if share.sequence_parallel else 1
    return whole + gathered + scores + split * size // share.tp


def _scores_kept(config: ModelConfig, size: int, share: RankShare) -> int:
    """Return the bytes of the scores that a token's heads keep, which they do with a soft cap.

    They are the values of tanh and the probabilities, in fp32 or wider; in half precision those are
    there a second time, rounded.
    """
    again = RecomputeModule.CORE_ATTN in share.policy.modules
    if config.attention_soft_cap is None or again:
        return 0
    of_one = 2 * max(size, 4) + (size if size < 4 else 0)
    return share.seq_length * config.num_attention_heads * of_one


def _middles(config: ModelConfig, share: RankShare) -> int:
    """Return how many tensors as wide as the middle of the MLP its backward pass needs."""
    if config.glu is None:
        return 2  # before and after the activation
    if share.fuse_gated_units and has_fused_unit(config):
        return 3  # gate, up and product
    is_bounded = config.activation_func_clamp_value is not None
    # And act(gate) with the sigmoid in it; the halves are new where they are not fc1's own.
    apart = (not config.has_plain_unit) + is_bounded
    return 4 + (config.activation is Activation.GELU_SIGMOID) + apart


def _middle_again(config: ModelConfig, size: int, share: RankShare, *, experts: bool) -> int:
    """Return bytes per token of the middle of one MLP while it is computed again."""
    again = 0
    if RecomputeModule.MLP in share.policy.modules:
        again = _middles(config, share)
    elif RecomputeModule.ACTIVATION in share.policy.modules:
        again = 1
    return again * _middle_width(config, experts=experts) * size // share.tp


def _middle_width(config: ModelConfig, *, experts: bool) -> int:
    """Return the width of the middles of all MLPs of a block that a token takes."""
    if not experts:
        return config.ffn_width
    shared = config.shared_expert_width or 0
    return config.moe_router_topk * config.expert_width + shared


def _embedding_parameters(config: ModelConfig, vocab_rows: int, seq_length: int) -> int:
    count = vocab_rows * config.hidden_size
    if config.position_embedding_type is PositionEmbedding.LEARNED:
        count += (config.max_position_embeddings or seq_length) * config.hidden_size
    return count + (norm_parameters(config) if config.embed_layernorm else 0)


def _block_parameters(config: ModelConfig, *, experts: bool, active: bool = False) -> int:
    h, width = config.hidden_size, config.head_width
    queries, keys = config.num_attention_heads * width, config.query_groups * width
    weights = block_weights(config, experts=experts, active=active)
    biases = 0
    if config.add_bias_linear or config.add_qkv_bias:
        biases += queries + 2 * keys
    if config.add_bias_linear:
        biases += h + _feed_forward_biases(config, experts=experts, active=active)
    if experts:
        vectors = config.moe_router_enable_expert_bias + config.moe_router_add_bias
        biases += vectors * (config.num_experts or 1)
    if experts and config.mlp_type is MlpType.RESIDUAL:
        biases += 2
    head_norms = 2 * norm_parameters_of(width, config) if config.qk_layernorm else 0
    if config.qk_layernorm and config.qk_layernorm_scope is QkNormScope.ALL_HEADS:
        head_norms = norm_parameters_of(queries + keys, config)
    place = config.norm_placement
    return (
        weights
        + biases
        + head_norms
        + 2 * (place.is_before + place.is_after) * norm_parameters(config)
    )


def block_weights(config: ModelConfig, *, experts: bool, active: bool) -> int:
    """Return the elements of a block's matrices; with `active` those used by one token."""
    h, width = config.hidden_size, config.head_width
    queries, keys = config.num_attention_heads * width, config.query_groups * width
    attention = h * (queries + 2 * keys) + queries * h
    return attention + feed_forward_weights(config, experts=experts, active=active)


def feed_forward_weights(config: ModelConfig, *, experts: bool, active: bool) -> int:
    """Return the elements of the matrices of a block's MLPs, as `block_weights` does."""
    if not experts:
        return _mlp_weights(config, config.ffn_width)
    scored = config.num_experts or 1
    met = config.moe_router_topk if active else scored
    shared = _mlp_weights(config, config.shared_expert_width or 0)
    gates = scored + config.moe_shared_expert_gate
    gates += 2 * (config.mlp_type is MlpType.RESIDUAL)
    return gates * config.hidden_size + met * _mlp_weights(config, config.expert_width) + shared


def _feed_forward_biases(config: ModelConfig, *, experts: bool, active: bool) -> int:
    if not experts:
        return _mlp_biases(config, config.ffn_width)
    met = config.moe_router_topk if active else config.num_experts or 1
    shared = config.shared_expert_width
    of_shared = 0 if shared is None else _mlp_biases(config, shared)
    return met * _mlp_biases(config, config.expert_width) + of_shared


def _mlp_biases(config: ModelConfig, width: int) -> int:
    """Return the elements of the biases of an MLP of this width."""
    if not config.add_bias_linear:
        return 0
    return (2 if config.glu is not None else 1) * width + config.hidden_size


def _mlp_weights(config: ModelConfig, width: int) -> int:
    """Return the elements of the matrices of an MLP of this width."""
    return (3 if config.glu is not None else 2) * config.hidden_size * width


def norm_parameters(config: ModelConfig) -> int:
    """Return the parameters of a norm over the hidden dimension."""
    return norm_parameters_of(config.hidden_size, config)


def norm_parameters_of(width: int, config: ModelConfig) -> int:
    """Return the parameters of a norm over `width` channels."""
    vectors = 1 if config.normalization is Normalization.RMS_NORM else 2
    return vectors * width
