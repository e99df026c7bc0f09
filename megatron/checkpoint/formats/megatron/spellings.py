"""The spellings in which files of ranks are written: names of parameters, and their order.

Forks of Megatron-LM load the names of version 3, current Megatron-LM those of megatron-core alone,
which differ with the modules that it computes with. Optimizers number parameters in the order of
modules, so the order is a part of a spelling; `source.py` reads any of them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from megatron.checkpoint.bert_tensors import ORDER, POOLER, WORDS, WORDS_NORM
from megatron.checkpoint.formats.megatron import names, t5_names
from megatron.config.checkpoint import MegatronNames

# Where core's modules stand in another order than those of version 3.
_HEADS = (WORDS, WORDS_NORM, "output", "output_bias", ORDER, POOLER)
_MLP = ("post_attention_norm", "mlp.fc1", "mlp.fc2")
_ATTENTION = ("attention.qkv", "attention.query_norm", "attention.key_norm")
_EDGE = names.MODULES[: names.MODULES.index(names.TYPES) + 1]
_LOCAL_NORMS: Mapping[str, str] = {
    "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
    "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Spelling:
    """One spelling: the modules in the order in which they are registered, and their names."""

    modules: tuple[str, ...] = names.MODULES
    is_core: bool = False
    has_fused_norms: bool = False

    def key(self, ours: str, *, trunk: str = "decoder", first_layer: int = 0) -> str:
        """Return the name in a file of our parameter; KeyError for one that it does not have.

        Args:
            trunk: core's name of the blocks: `decoder` of a GPT, `encoder` of a BERT.
            first_layer: the index in the whole model of the file's layer 0.
        """
        if not self.is_core:
            return names.megatron_name(ours, first_layer=first_layer)
        key = names.core_name(ours, trunk=trunk, first_layer=first_layer)
        if key is None:
            raise KeyError(ours)
        for fused, alone in _LOCAL_NORMS.items():
            if not self.has_fused_norms:
                key = key.replace(fused, alone)
        return key

    def has(self, ours: str) -> bool:
        """Return whether there is a name for our parameter."""
        try:
            self.key(ours)
        except KeyError:
            return False
        return True

    def order(self, ours: str) -> tuple[int, int, int, str]:
        """Return a key that sorts our names as modules hold them: edge, layers, edge."""
        return names.module_order(ours, modules=self.modules)


@dataclass(frozen=True, slots=True, kw_only=True)
class T5Spelling(Spelling):
    """The names of version 3 of a T5, whose stacks are in one file."""

    def key(self, ours: str, *, trunk: str = "decoder", first_layer: int = 0) -> str:
        """Return the name in a file of our parameter; KeyError for one that it does not have."""
        del trunk, first_layer
        return t5_names.megatron_t5_name(ours)

    def order(self, ours: str) -> tuple[int, int, int, str]:
        """Return a key that sorts our names as modules hold them."""
        return t5_names.t5_module_order(ours)


SPELLINGS: Mapping[MegatronNames, Spelling] = MappingProxyType(
    {
        MegatronNames.LEGACY: Spelling(),
        MegatronNames.CORE: Spelling(
            modules=(
                *(*_EDGE, "attention.output", "input_norm", *_ATTENTION, *_MLP),
                *("final_norm", *_HEADS),
            ),
            is_core=True,
            has_fused_norms=True,
        ),
        MegatronNames.CORE_LOCAL: Spelling(
            modules=(
                *(*_EDGE, "input_norm", "attention.output", *_ATTENTION, *_MLP),
                *("final_norm", *_HEADS),
            ),
            is_core=True,
        ),
    }
)
"""Every spelling by the value of --megatron-names."""
