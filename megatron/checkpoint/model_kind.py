"""The kind of a checkpoint's model, and the heads that it has above the common part.

Our checkpoints record the kind: the name of the `PretrainTask` that was trained. For other formats,
and for older checkpoints, it follows from the names of parameters, which a prefix LM shares with a
GPT. A reader would expect heads to
be part of the kind: they are not, since one BERT is used with and without them. No torch here.
"""

from collections.abc import Iterable

from megatron.errors import CheckpointError

GPT, PREFIX_LM, BERT, CLASSIFIER = "gpt", "prefix_lm", "bert", "classifier"
T5 = "t5"
BIENCODER = "biencoder"
VIT = "vit"

_TEXTS = {
    GPT: "a GPT (kind gpt)",
    PREFIX_LM: "a prefix LM (kind prefix_lm)",
    BERT: "a BERT (kind bert)",
    T5: "a T5 (kind t5)",
    BIENCODER: "a retriever with two towers (kind biencoder)",
    CLASSIFIER: "a fine-tuned classifier on a BERT (kind classifier)",
    VIT: "a ViT (kind vit)",
}
_PREFIX = "model/"
_ENCODER_AND_DECODER = "decoder."  # begins names of parameters of a T5 alone
# Names of parameters that identify a BERT, and those of its heads.
_SEGMENTS = "embedding.tokentype."
_PATCHES = "embedding.patch."  # of a ViT
_POOLER, _ORDER = "pooler", "order_head"
_WORDS = ("lm_head", "output_bias")
_CLASSES = "classification_head"
HEADS = (_POOLER, _ORDER, *_WORDS, _CLASSES)


def kind_from_names(names: Iterable[str]) -> str:
    """Return the kind of model with parameters of these names, with or without `model/`."""
    found = {name.removeprefix(_PREFIX) for name in names}
    heads = heads_of(found)
    if any(name.startswith(_ENCODER_AND_DECODER) for name in found):
        return T5
    if any(name.startswith(_PATCHES) for name in found):
        return VIT
    if _CLASSES in heads:
        return CLASSIFIER
    return BERT if heads or any(name.startswith(_SEGMENTS) for name in found) else GPT


def has_optional_heads(kind: str) -> bool:
    """Return whether models of this kind are one encoder, with and without heads: BERTs."""
    return kind in (BERT, CLASSIFIER)


def heads_of(names: Iterable[str]) -> frozenset[str]:
    """Return the modules among `HEADS` that parameters of these global names are of."""
    modules = {name.removeprefix(_PREFIX).partition(".")[0] for name in names}
    return frozenset(modules.intersection(HEADS))


def known_kind(kind: str, names: Iterable[str]) -> str:
    """Return `kind`, or for a kind of a user's program the one that parameter names give."""
    return kind if kind in _TEXTS else kind_from_names(names)


def differ(saved: str, wanted: str) -> bool:
    """Return whether two kinds are known to be different models.

    A user's program may choose any kind: its checkpoints are compared by names and shapes.
    """
    return saved != wanted and {saved, wanted} <= _TEXTS.keys()


def has_same_parameters(saved: str, wanted: str) -> bool:
    """Return whether the weights of one kind are those of the other, which uses them otherwise."""
    return {saved, wanted} <= {GPT, PREFIX_LM}


def refuse_kind(saved: str, wanted: str, *, where: object, wants: str = "this run") -> None:
    """Raise CheckpointError if a model of another kind is needed than `where` holds.

    Args:
        wants: a description of what needs the other kind.
    """
    if not differ(saved, wanted):
        return
    fix = f"give a checkpoint of {_TEXTS[wanted]}, or use a program for {_TEXTS[saved]}"
    if has_same_parameters(saved, wanted):
        fix += "; a training begins with its weights by --finetune"
    raise CheckpointError(
        f"the checkpoint is of another kind of model than {wants} takes",
        found=f"{where} holds {_TEXTS[saved]}, and {wants} takes {_TEXTS[wanted]}",
        fix=fix,
    )


def refuse_heads(saved: Iterable[str], wanted: Iterable[str], *, where: object) -> None:
    """Raise CheckpointError when `saved` and `wanted` (global names) have different heads.

    The message names the flags with which the one can be loaded into the other.
    """
    saved_heads, run_heads = heads_of(saved), heads_of(wanted)
    lacking = [head for head in HEADS if head in run_heads - saved_heads]
    spare = [head for head in HEADS if head in saved_heads - run_heads]
    if not lacking and not spare:
        return
    found = []
    if lacking:
        found.append(f"it has no {', '.join(lacking)}, which the run has")
    if spare:
        found.append(f"it has {', '.join(spare)}, which the run has not")
    fixes = []
    if _ORDER in lacking and _POOLER not in saved_heads:
        fixes.append("add --bert-no-binary-head")
    if _ORDER in spare:
        fixes.append("drop --bert-no-binary-head")
    patterns = " ".join(f"'{head}.*'" for head in (*lacking, *spare))
    named = f"--load-except {patterns}"
    if lacking:
        fixes.append(f"begin with random values of what is not there: {named}")
    else:
        fixes.append(f"leave it out: {named}")
    raise CheckpointError(
        "the checkpoint has other heads than this run",
        found=f"{where}: {'; '.join(found)}",
        fix=", or ".join(fixes),
    )
