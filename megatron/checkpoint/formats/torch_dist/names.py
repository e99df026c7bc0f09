"""Model keys of Megatron core's distributed checkpoints, to and from our names.

Equal layers are stacked: one key for all of them, with the layer as the first axis. Where layers
differ (some with experts), each has keys of its own. The names of modules are those of
`megatron/names.py`; experts and the cross attention of core's T5 are in this layout alone. What a
reader would get wrong: core's T5 keeps its table of positions and its head under two keys each.
"""

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import NamedTuple

from megatron.checkpoint.bert_tensors import WORD_BIAS
from megatron.checkpoint.formats.megatron import names
from megatron.checkpoint.formats.megatron.t5_names import ENCODER_MODULES, LEAVES
from megatron.checkpoint.t5_tensors import STACKS

# Core's module in a block with experts, and ours.
_EXPERT_MODULES: Mapping[str, str] = {
    "mlp.experts.experts.linear_fc1": "mlp.experts.fc1",
    "mlp.experts.experts.linear_fc2": "mlp.experts.fc2",
    "mlp.shared_experts.linear_fc1": "mlp.shared_expert.fc1",
    "mlp.shared_experts.linear_fc2": "mlp.shared_expert.fc2",
}
BLOCK: Mapping[str, str] = MappingProxyType(
    {
        **names.BLOCK,
        "mlp.router.weight": "mlp.router.weight",
        "mlp.router.expert_bias": "mlp.router.expert_bias",
        "mlp.shared_experts.gate_weight": "mlp.shared_expert.gate",
        **{
            f"{core}.{leaf}": f"{ours}.{leaf}"
            for core, ours in _EXPERT_MODULES.items()
            for leaf in LEAVES
        },
    }
)
"""Our name of a parameter within a block, by every name that it has in these layouts."""

# Our modules that a block of the decoder of core's T5 has beside those of its encoder.
_CROSS_MODULES: Mapping[str, str] = {
    "cross_norm": "pre_cross_attn_layernorm",
    "cross_attention.query": "cross_attention.linear_q",
    "cross_attention.key_value": "cross_attention.linear_kv",
    "cross_attention.output": "cross_attention.linear_proj",
}
# The first key of a parameter comes first; core keeps optimizer state under the last.
_T5_EDGES: Mapping[str, tuple[str, ...]] = {
    names.WORD: ("embedding.word_embeddings.weight",),
    names.POSITION: ("embedding.position_embeddings.weight", "position_embeddings.weight"),
    names.OUTPUT: ("lm_head.output_layer.weight", "output_layer.weight"),
    WORD_BIAS: ("lm_head.output_layer.bias", "output_layer.bias"),
    **{
        f"{stack}.final_norm.{leaf}": (f"{stack}.final_layernorm.{leaf}",)
        for stack in STACKS
        for leaf in LEAVES
    },
}


def _t5_blocks() -> dict[str, dict[str, str]]:
    """Return core's name of a parameter within a block of each stack by ours."""
    encoder = {}
    for ours in (f"{module}.{leaf}" for module in ENCODER_MODULES for leaf in LEAVES):
        key = names.core_name(f"layers.0.{ours}", trunk="")
        encoder[ours] = str(key).removeprefix(".layers.0.")
    cross = {
        f"{ours}.{leaf}": f"{core}.{leaf}"
        for ours, core in _CROSS_MODULES.items()
        for leaf in LEAVES
    }
    return dict(zip(STACKS, (encoder, encoder | cross)))


_TO_T5_BLOCKS = _t5_blocks()
_OF_T5 = {
    f"{stack}.layers.{core}": ours
    for stack, block in _TO_T5_BLOCKS.items()
    for ours, core in block.items()
}
_OF_T5_EDGES = {key: ours for ours, keys in _T5_EDGES.items() for key in keys}
_TO_EXPERTS = {ours: core for core, ours in BLOCK.items() if core not in names.BLOCK}
_OUR_LAYER = re.compile(r"layers\.(\d+)\.(.+)")
_OUR_T5_LAYER = re.compile(r"(encoder|decoder)\.layers\.\d+\.(.+)")
_ONE_LAYER = re.compile(r"(?:encoder|decoder)\.layers\.(\d+)\.(.+)")
_ALL_LAYERS = re.compile(r"(?:encoder|decoder)\.layers\.(.+)")
# Linear layers of a block; the projection to the vocabulary has no such state in a GPT.
_LINEAR = re.compile(r"(?:encoder|decoder)\.layers\..*linear_\w+")
_STATE = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.(\w+?)\.(.+)")
# Kinds of optimizer state in fp32: the weights are kept under two names.
_KINDS: Mapping[str, str] = {
    "exp_avg": "exp_avg",
    "exp_avg_sq": "exp_avg_sq",
    "momentum_buffer": "momentum_buffer",
    "param": "master",
    "fp32_param": "master",
}


class StateKey(NamedTuple):
    """The key of one kind of optimizer state (ours), and the model key that it is of."""

    kind: str
    model_key: str


def state_key(key: str) -> StateKey | None:
    """Return the parts of a key of optimizer state by model key; None for other keys."""
    match = _STATE.fullmatch(key)
    if match is None or match[1] not in _KINDS:
        return None
    return StateKey(_KINDS[match[1]], match[2])


def is_optimizer(key: str) -> bool:
    """Return whether a key is of an optimizer, in any layout of its state."""
    return re.match(r"(?:chained_\d+\.)?optimizer\.", key) is not None


def is_stacked(key: str) -> bool:
    """Return whether a model key is of all layers at once."""
    return _ALL_LAYERS.fullmatch(key) is not None and _ONE_LAYER.fullmatch(key) is None


def our_names(key: str, num_layers: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield our names of the parameters under a model key; nothing for an unknown key.

    Each comes with its leading indices in the stored tensor: the layer, where all are stacked.

    Args:
        num_layers: the first axis of the stored tensor.
    """
    if key in names.EDGES:
        yield names.EDGES[key], ()
    elif (match := _ONE_LAYER.fullmatch(key)) is not None:
        if match[2] in BLOCK:
            yield f"layers.{int(match[1])}.{BLOCK[match[2]]}", ()
    elif (match := _ALL_LAYERS.fullmatch(key)) is not None and match[1] in BLOCK:
        for layer in range(num_layers):
            yield f"layers.{layer}.{BLOCK[match[1]]}", (layer,)


def is_t5(keys: Iterable[str]) -> bool:
    """Return whether model keys are of a T5: its decoder alone attends across."""
    return any(".layers." in key and ".cross_attention." in key for key in keys)


def our_t5_names(key: str, num_layers: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield our names of the parameters of a T5 under a model key: see `our_names`."""
    stack = key.partition(".")[0]
    if key in _OF_T5_EDGES:
        yield _OF_T5_EDGES[key], ()
    elif (match := _ONE_LAYER.fullmatch(key)) is not None:
        if (alone := f"{stack}.layers.{match[2]}") in _OF_T5:
            yield f"{stack}.layers.{int(match[1])}.{_OF_T5[alone]}", ()
    elif key in _OF_T5:
        for layer in range(num_layers):
            yield f"{stack}.layers.{layer}.{_OF_T5[key]}", (layer,)


def core_t5_keys(ours: str) -> Iterator[str]:
    """Yield the model keys that hold our parameter of a T5, the layers of a stack in one.

    None if core's T5 does not have it; two for what core keeps twice.
    """
    yield from _T5_EDGES.get(ours, ())
    match = _OUR_T5_LAYER.fullmatch(ours)
    if match is not None and match[2] in _TO_T5_BLOCKS[match[1]]:
        yield f"{match[1]}.layers.{_TO_T5_BLOCKS[match[1]][match[2]]}"


def core_keys(ours: str, *, trunk: str, is_stacked: bool, has_experts: bool) -> Iterator[str]:
    """Yield the model keys that hold our parameter; none if core does not have it.

    Args:
        trunk: `decoder` of a GPT, `encoder` of a BERT.
        is_stacked: whether the layers are stacked, so that their number is not in the key.
        has_experts: whether the parameter's layer has experts.
    """
    match = _OUR_LAYER.fullmatch(ours)
    if match is not None and match[2] in _TO_EXPERTS:
        key: str | None = f"{trunk}.layers.{match[1]}.{_TO_EXPERTS[match[2]]}"
    else:
        key = names.core_name(ours, trunk=trunk)
    if key is None:
        return
    prefix = f"{trunk}.layers." if is_stacked else f"{trunk}.layers.{match[1] if match else 0}."
    if match is not None:
        key = prefix + key.split(".", 3)[3]
    yield key
    # Core's modules for a GPU keep the norm before experts apart; its others do not.
    if has_experts and match is not None and match[2].startswith("post_attention_norm."):
        yield f"{prefix}pre_mlp_layernorm.{match[2].rpartition('.')[2]}"


def extra_state_keys(key: str, shape: tuple[int, ...]) -> Iterator[str]:
    """Yield the keys of the objects that core keeps beside the weight `key` of a linear layer.

    One for each layer of a stack, and for each of its experts; None without FP8, and required.
    """
    module, _, leaf = key.rpartition(".")
    if leaf != "weight" or not _LINEAR.fullmatch(module):
        return
    axes = shape[:1] if is_stacked(key) else ()
    if ".experts.experts." in key:
        axes += shape[len(axes) : len(axes) + 1]
    count = ".".join(str(size) for size in axes) or "1"
    for place in itertools.product(*map(range, axes)):
        yield f"{module}._extra_state/shard_{'.'.join(map(str, place)) or '0'}_{count}"


def model_order(ours: str) -> tuple[int, int, int, str]:
    """Return a key that sorts our names as modules hold them; experts after other MLPs."""
    if names.is_known(ours):
        return names.module_order(ours)
    _, layer, inside = ours.split(".", 2)
    last_module = names.module_order(f"layers.{layer}.mlp.fc2.bias")[2]
    return 1, int(layer), last_module, f"c.{inside}"
