"""GPT written a second time, as slowly and plainly as possible, to compare the real one with.

Works on a state dict with global names, one sequence, one head and one query at a time; rotation
is complex multiplication, ALiBi is a slope times the key's index. Shares no code with the model.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from megatron.config.model import GluActivation, ModelConfig, RopeType

State = Mapping[str, Tensor]


def naive_logits(
    config: ModelConfig,
    state: State,
    tokens: Tensor,
    position_ids: Tensor | None = None,
    document_ids: Tensor | None = None,
    is_prefix: Tensor | None = None,
) -> Tensor:
    """Logits [b, s, v] over the padded vocabulary."""
    rows = []
    for row in range(tokens.shape[0]):
        length = tokens.shape[1]
        positions = torch.arange(length) if position_ids is None else position_ids[row]
        documents = torch.zeros(length) if document_ids is None else document_ids[row]
        prefixes = torch.zeros(length) if is_prefix is None else is_prefix[row]
        seen = _seen_tokens(documents.tolist(), prefixes.tolist())
        rows.append(_sequence(config, state, tokens[row], positions, seen))
    return torch.stack(rows)


def _seen_tokens(documents: list[float], prefixes: list[float]) -> list[list[int]]:
    """The tokens that each token sees where there is no window."""
    every = range(len(documents))
    return [
        [j for j in every if documents[j] == documents[i] and (j <= i or prefixes[j])]
        for i in every
    ]


def _sequence(
    config: ModelConfig, state: State, tokens: Tensor, positions: Tensor, seen: list[list[int]]
) -> Tensor:
    x = config.embedding_factor * state["embedding.word.weight"][tokens]
    if config.embed_layernorm:
        x = _norm(config, state, "embedding.norm", x)
    if config.position_embedding_type == "learned_absolute":
        x = x + state["embedding.position.weight"][positions]
    for layer in range(config.num_layers):
        name = f"layers.{layer}"
        entering = x
        normed = _norm(config, state, f"{name}.input_norm", x)
        base = normed if config.apply_residual_connection_post_layernorm else x
        added = _attention(config, state, f"{name}.attention", normed, positions, seen)
        added = _norm(config, state, f"{name}.attention_output_norm", added)
        x = base + config.residual_multiplier * added
        read = entering if config.use_parallel_residual else x
        normed = _norm(config, state, f"{name}.post_attention_norm", read)
        base = normed if config.apply_residual_connection_post_layernorm else x
        added = _mlp(config, state, f"{name}.mlp", normed)
        added = _norm(config, state, f"{name}.mlp_output_norm", added)
        x = base + config.residual_multiplier * added
    x = _norm(config, state, "final_norm", x)
    head = "embedding.word" if config.tied else "output"
    logits = x @ state[f"{head}.weight"].T / config.logit_denominator
    cap = config.logit_soft_cap
    return logits if cap is None else cap * (1 - 2 / (torch.exp(2 * logits / cap) + 1))


def _norm(config: ModelConfig, state: State, name: str, x: Tensor) -> Tensor:
    """The norm of this name; `x` itself where the model has none."""
    if f"{name}.weight" not in state:
        return x
    if config.normalization == "RMSNorm":
        scale = (x * x).mean(-1, keepdim=True) + config.layernorm_epsilon
        return x / scale.sqrt() * state[f"{name}.weight"]
    centred = x - x.mean(-1, keepdim=True)
    variance = (centred * centred).mean(-1, keepdim=True)
    scaled = centred / (variance + config.layernorm_epsilon).sqrt()
    return scaled * state[f"{name}.weight"] + state[f"{name}.bias"]


def _linear(state: State, name: str, x: Tensor) -> Tensor:
    y = x @ state[f"{name}.weight"].T
    return y + state[f"{name}.bias"] if f"{name}.bias" in state else y


def _attention(
    config: ModelConfig,
    state: State,
    name: str,
    x: Tensor,
    positions: Tensor,
    seen_tokens: list[list[int]],
) -> Tensor:
    width = config.kv_channels or config.hidden_size // config.num_attention_heads
    groups = config.num_query_groups or config.num_attention_heads
    per_group = config.num_attention_heads // groups
    columns = [*torch.split(_linear(state, f"{name}.qkv", x), width, dim=-1)]  # [q.. k v] per group
    if config.qk_layernorm_scope == "all-heads":
        _norm_all_heads(config, state, name, columns, per_group)
    heads = []
    for head in range(config.num_attention_heads):
        group, place = divmod(head, per_group)
        first = group * (per_group + 2)
        q, k, v = columns[first + place], columns[first + per_group], columns[first + per_group + 1]
        if config.qk_layernorm and config.qk_layernorm_scope == "head":
            q = _norm(config, state, f"{name}.query_norm", q)
            k = _norm(config, state, f"{name}.key_norm", k)
        layer = int(name.split(".")[1])
        if config.position_embedding_type == "rope" and layer not in config.layers_without_rotation:
            own = layer not in config.layers_without_window and config.window_rotary_base
            turning = _unscaled(config, own) if own else config
            q, k = (_rotated(turning, t, positions) for t in (q, k))
        window = None if layer in config.layers_without_window else config.sliding_window
        rows = []
        for i in range(x.shape[0]):
            seen = [j for j in seen_tokens[i] if window is None or abs(i - j) < window]
            scores = (k[seen] @ q[i]) * config.score_scale
            cap = config.attention_soft_cap
            scores = scores if cap is None else cap * (1 - 2 / (torch.exp(2 * scores / cap) + 1))
            if config.position_embedding_type == "alibi":
                slope = _slope(head, config.num_attention_heads)
                scores = scores - slope * (torch.tensor(seen, dtype=x.dtype) - i).abs()
            beside = _sink(config, state, name, head)
            weights = scores.exp() / (scores.exp().sum() + beside)
            rows.append(weights @ v[seen])
        heads.append(torch.stack(rows))
    return _linear(state, f"{name}.output", torch.cat(heads, dim=-1))


def _norm_all_heads(
    config: ModelConfig, state: State, name: str, columns: list[Tensor], per_group: int
) -> None:
    """Replace the queries, and the keys, of all groups by one normed vector's parts."""
    for kind, places in (("query", range(per_group)), ("key", range(per_group, per_group + 1))):
        own = [at for at in range(len(columns)) if at % (per_group + 2) in places]
        normed = _norm(
            config, state, f"{name}.{kind}_norm", torch.cat([columns[at] for at in own], -1)
        )
        for at, part in zip(own, torch.split(normed, columns[0].shape[-1], dim=-1)):
            columns[at] = part


def _sink(config: ModelConfig, state: State, name: str, head: int) -> Tensor | float:
    """The exponential of the score that stands beside those of the keys of a head."""
    sinks = state.get(f"{name}.sinks")
    return float(config.has_sinks) if sinks is None else sinks[head].exp()


def _rotated(config: ModelConfig, t: Tensor, positions: Tensor) -> Tensor:
    channels = int(t.shape[-1] * config.rotary_percent)
    half = channels // 2
    pairs = torch.complex(t[:, :half], t[:, half:channels])
    exponents = torch.arange(half, dtype=torch.float64) * 2 / channels
    waves = [_wave_length(config, 2 * math.pi * config.rotary_base ** float(e)) for e in exponents]
    if config.rope_type == "yarn":
        waves = [_yarn_wave(config, at, half) for at in range(half)]
    angles = (
        positions.to(torch.float64)[:, None]
        * 2
        * math.pi
        / torch.tensor(waves, dtype=torch.float64)
    )
    turned = _yarn_size(config) * pairs * torch.exp(1j * angles)
    return torch.cat((turned.real, turned.imag, t[:, channels:]), dim=-1)


def _unscaled(config: ModelConfig, base: float) -> ModelConfig:
    return dataclasses.replace(
        config,
        rotary_base=base,
        rotary_seq_len_interpolation_factor=None,
        use_rope_scaling=False,
        rope_type=RopeType.ROPE,
        window_rotary_base=None,
    )


def _yarn_wave(config: ModelConfig, pair: int, pairs: int) -> float:
    """Positions until pair number `pair` of `pairs` is where it began, under YaRN."""
    length = 2 * math.pi * config.rotary_base ** (pair / pairs)
    bounds = []
    for turns in (config.yarn_beta_fast, config.yarn_beta_slow):
        wave = config.yarn_original_max_position_embeddings / turns
        bounds.append(pairs * math.log(wave / (2 * math.pi), config.rotary_base))
    first, last = bounds
    if config.yarn_correction_range_round_to_int:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * pairs - 1)
    slow = min(max((pair - first) / (last - first), 0), 1)
    return float(1 / (slow / (config.rotary_scaling_factor * length) + (1 - slow) / length))


def _yarn_size(config: ModelConfig) -> float:
    if config.rope_type != "yarn":
        return 1.0
    over, under = config.mscale, config.mscale_all_dim
    log = math.log(config.rotary_scaling_factor)
    return (0.1 * over * log + 1) / (0.1 * under * log + 1)


def _wave_length(config: ModelConfig, length: float) -> float:
    """Positions until a pair of channels is where it began, after what scaling does to it."""
    if config.rotary_seq_len_interpolation_factor is not None:
        return length * config.rotary_seq_len_interpolation_factor
    original = config.rope_scaling_original_length
    if not config.use_rope_scaling or length < original / config.rope_scaling_high_freq_factor:
        return length
    slow = length * config.rope_scaling_factor
    if length > original / config.rope_scaling_low_freq_factor:
        return slow
    low, high = config.rope_scaling_low_freq_factor, config.rope_scaling_high_freq_factor
    smooth = (original / length - low) / (high - low)
    return 1 / ((1 - smooth) / slow + smooth / length)


def _slope(head: int, heads: int) -> float:
    if heads & (heads - 1) == 0:
        return float(2.0 ** (-8.0 * (head + 1) / heads))
    power = 1 << (heads.bit_length() - 1)
    if head < power:
        return _slope(head, power)
    return _slope(2 * (head - power), 2 * power)


def _mlp(config: ModelConfig, state: State, name: str, x: Tensor) -> Tensor:
    middle = _linear(state, f"{name}.fc1", x)
    glu = GluActivation.SWIGLU if config.swiglu else config.glu_activation
    if glu is not None:
        gate, up = middle[:, : middle.shape[1] // 2], middle[:, middle.shape[1] // 2 :]
        bound = config.activation_func_clamp_value or math.inf
        gate, up = gate.clamp_max(bound), up.clamp(-bound, bound) + config.glu_linear_offset
        return _linear(state, f"{name}.fc2", _GATES[glu](gate) * up)
    if config.squared_relu:
        middle = middle.clamp_min(0) ** 2
    elif config.relu:
        middle = middle.clamp_min(0)
    elif config.onnx_safe:
        middle = _gelu(middle)
    else:
        inner = math.sqrt(2 / math.pi) * (middle + 0.044715 * middle**3)
        middle = 0.5 * middle * (1 + torch.tanh(inner))
    return _linear(state, f"{name}.fc2", middle)


def _gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))


_GATES: dict[str, Callable[[Tensor], Tensor]] = {
    "geglu": _gelu,
    "liglu": lambda x: x,
    "reglu": lambda x: x.clamp_min(0),
    "geglu_tanh": lambda x: x / (1 + torch.exp(-2 * (2 / math.pi) ** 0.5 * (x + 0.044715 * x**3))),
    "quick_geglu": lambda x: x / (1 + torch.exp(-1.702 * x)),
    "swiglu": lambda x: x / (1 + torch.exp(-x)),
}
