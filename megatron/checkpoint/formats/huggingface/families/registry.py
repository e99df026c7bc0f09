"""The list of families, those without a model here yet, and the search for one that fits ours."""

import difflib
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from megatron.checkpoint import model_kind
from megatron.checkpoint.formats.huggingface.families.bert import BERT
from megatron.checkpoint.formats.huggingface.families.bloom import BLOOM
from megatron.checkpoint.formats.huggingface.families.falcon import FALCON
from megatron.checkpoint.formats.huggingface.families.gemma import GEMMA2, GEMMA3
from megatron.checkpoint.formats.huggingface.families.gpt2 import GPT2
from megatron.checkpoint.formats.huggingface.families.gpt_neox import GPT_NEOX
from megatron.checkpoint.formats.huggingface.families.gpt_oss import GPT_OSS
from megatron.checkpoint.formats.huggingface.families.granite import GRANITE
from megatron.checkpoint.formats.huggingface.families.llama import LLAMA
from megatron.checkpoint.formats.huggingface.families.megatron_bert import MEGATRON_BERT
from megatron.checkpoint.formats.huggingface.families.mistral import MISTRAL
from megatron.checkpoint.formats.huggingface.families.mixtral import MIXTRAL
from megatron.checkpoint.formats.huggingface.families.olmo2 import OLMO2
from megatron.checkpoint.formats.huggingface.families.opt import OPT
from megatron.checkpoint.formats.huggingface.families.phi3 import PHI3
from megatron.checkpoint.formats.huggingface.families.qwen import QWEN2, QWEN3
from megatron.checkpoint.formats.huggingface.families.qwen_moe import QWEN2_MOE, QWEN3_MOE
from megatron.checkpoint.formats.huggingface.families.smollm3 import SMOLLM3
from megatron.checkpoint.formats.huggingface.families.t5 import T5
from megatron.checkpoint.formats.huggingface.families.vit import VIT
from megatron.checkpoint.formats.huggingface.family import Family
from megatron.config.model import ModelConfig
from megatron.errors import CheckpointError

# In the order of the search for a model of ours: the first family that lacks nothing is taken.
FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        family.model_type: family
        for family in (
            *(GPT2, GPT_NEOX, BLOOM, FALCON, LLAMA, MISTRAL, PHI3, QWEN2, QWEN3, SMOLLM3),
            *(OLMO2, GRANITE, OPT, GEMMA2, GEMMA3),
            *(MIXTRAL, QWEN2_MOE, QWEN3_MOE, GPT_OSS),
            *(BERT, MEGATRON_BERT, T5),
            VIT,
        )
    }
)
WITHOUT_MODEL: Mapping[str, str] = MappingProxyType(
    {
        "roberta": "bidirectional encoder",
    }
)


def family_called(model_type: object, *, path: Path | str) -> Family:
    """Return the family of a `model_type`; `path` is the config.json or the flag that gives it."""
    if isinstance(model_type, str) and model_type in FAMILIES:
        return FAMILIES[model_type]
    if isinstance(model_type, str) and model_type in WITHOUT_MODEL:
        raise CheckpointError(
            f"the family of this Hugging Face model has no model here yet: a "
            f"{WITHOUT_MODEL[model_type]}",
            found=f"{path}: 'model_type' is {model_type!r}",
            fix=f"convert a model of {', '.join(FAMILIES)}",
        )
    near = difflib.get_close_matches(str(model_type), FAMILIES, n=1)
    raise CheckpointError(
        "the family of this Hugging Face model is not known here",
        found=f"{path}: 'model_type' is {model_type!r}",
        fix=f"convert a model of {', '.join(FAMILIES)}"
        + (f"; did you mean {near[0]}?" if near else ""),
    )


def family_for(
    config: ModelConfig, wanted: str | None = None, *, kind: str = model_kind.GPT
) -> Family:
    """Return the family that can hold our model; `wanted` by its name, else the first that can.

    Args:
        kind: of model, one of those in `model_kind`.

    Raises:
        CheckpointError: what each of them lacks.
    """
    if wanted is not None:
        family = family_called(wanted, path="the family asked for")
        if kind not in family.kinds:
            model_kind.refuse_kind(
                kind, family.kinds[0], where="the checkpoint", wants=f"the family {wanted}"
            )
        candidates = [family]
    else:
        candidates = [family for family in FAMILIES.values() if kind in family.kinds]
        if not candidates:
            raise CheckpointError(
                "no family of Hugging Face models is of this kind",
                found=f"kind {kind}",
                fix="such a model cannot be exported; its checkpoint stays as it is",
            )
    lacking = {family.model_type: list(family.lacks(config)) for family in candidates}
    for family in candidates:
        if not lacking[family.model_type]:
            return family
    # Report the closest family only, since six lists would hide the one that matters.
    closest = min(lacking.values(), key=len)
    raise CheckpointError(
        "no family of Hugging Face models computes what this model does"
        if wanted is None
        else f"the family {wanted} does not compute what this model does",
        found="; ".join(closest),
        fix="such a model cannot be exported; its checkpoint stays as it is",
    )
