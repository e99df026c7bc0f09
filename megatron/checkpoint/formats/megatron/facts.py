"""Facts about a run in the files that Megatron-LM saved, equal in all of its layouts.

Read from `args` and from the entries beside the model: progress, rows of the vocabulary, the loss
scale. `args` itself is translated in `args.py`.
"""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from megatron.checkpoint.folder.run_folder import RELEASE
from megatron.checkpoint.source import SourceOptions
from megatron.checkpoint.t5_tensors import CONFIG_GROUP
from megatron.errors import CheckpointError

_LAYER = re.compile(r"(?:(encoder|decoder)\.)?layers\.(\d+)\.")
_DIVISIBLE_BY = 128  # Megatron's default of --make-vocab-size-divisible-by


def progress(
    content: Mapping[str, Any], args: Mapping[str, Any], directory: Path
) -> dict[str, int]:
    """Return the progress of the run; empty for a release, from which a run starts."""
    if directory.name == RELEASE:
        return {}
    iteration = int(content.get("iteration", content.get("total_iters", 0)))
    samples = args.get("consumed_train_samples")
    if samples is None and args.get("global_batch_size"):
        samples = iteration * int(args["global_batch_size"])  # as Megatron counts them then
    known = {"iteration": iteration}
    if samples is not None:
        known["consumed_samples"] = int(samples)
        length = int(args.get("seq_length") or 0)
        tokens = content.get("tokens", args.get("consumed_train_tokens"))
        known["consumed_tokens"] = int(tokens or int(samples) * length)
    if args.get("consumed_valid_samples") is not None:
        known["consumed_valid_samples"] = int(args["consumed_valid_samples"])
    return known


def true_rows(
    padded: int,
    content: Mapping[str, Any],
    args: Mapping[str, Any],
    options: SourceOptions,
    *,
    tp: int,
) -> int:
    """Return how many of the `padded` vocabulary rows are tokens, in a run of tp ranks.

    The file records it, else `options` give it; without either every row counts.
    """
    info = content.get("checkpoint_info")
    known = info.get("original_vocab_size") if isinstance(info, Mapping) else None
    known = known or options.vocab_size
    multiple = int(args.get("make_vocab_size_divisible_by") or _DIVISIBLE_BY) * tp
    return int(known) if known is not None and 0 <= padded - known < multiple else padded


def check_layers(parameters: Iterable[str], config: Mapping[str, Any], at: Path) -> None:
    """Raise CheckpointError if parameters (our names) are not of every layer of the model."""
    layers = layers_by_stack(parameters) or {"": set()}
    for stack, found in layers.items():
        group, name = "model", "num_layers"
        if stack == "decoder":
            group, name = CONFIG_GROUP, "decoder_num_layers"
        num_layers = config.get(group, {}).get(name, len(found))
        if found != set(range(num_layers)):
            raise CheckpointError(
                "the checkpoint does not hold every layer of its model",
                found=f"{at}: {len(found)} layers, but {name}={num_layers} in args",
                fix="copy the checkpoint whole",
            )


def stack_of(name: str) -> str:
    """Return the stack of a layer that has the parameter `name` (ours); empty for a GPT's."""
    match = _LAYER.match(name)
    return "" if match is None else match[1] or ""


def layers_by_stack(parameters: Iterable[str]) -> dict[str, set[int]]:
    """Return the numbers of the layers among our names, by stack; that of a GPT has no name."""
    found: dict[str, set[int]] = {}
    for name in parameters:
        if match := _LAYER.match(name):
            found.setdefault(match[1] or "", set()).add(int(match[2]))
    return found


def loss_scaler(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of our loss scaler; empty for a constant scale, which follows the flags."""
    kept = state.get("grad_scaler") or {}
    if "growth_tracker" not in kept:
        return {}
    return {
        "scale": float(kept["scale"]),
        "good_iterations": int(kept["growth_tracker"]),
        "overflows_left": int(kept["hysteresis_tracker"]),
    }
