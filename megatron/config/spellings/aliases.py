"""Flags of other Megatrons that stand for flags of ours.

What a reader would get wrong: other names of one flag of ours are declared at its field, and flags
whose meaning depends on those beside them in `config.dependent_flags`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from megatron.config.spellings.data_files import data_path_words, paths_of_splits

# Spellings that stand for one of ours, with its value; a value that is left out follows.
ALIASES: Mapping[str, tuple[str, ...]] = {
    "--checkpoint-activations": ("--recompute-granularity", "full"),
    "--recompute-activations": ("--recompute-granularity", "selective"),
    "--moe-layer-recompute": (
        *("--recompute-granularity", "selective"),
        *("--recompute-modules", "mlp"),
    ),
    "--activations-checkpoint-method": ("--recompute-granularity", "full", "--recompute-method"),
    "--use-rotary-position-embeddings": ("--position-embedding-type", "rope"),
    "--rotary-position-embeddings-theta": ("--rotary-base",),
    "--distributed-timeout": ("--distributed-timeout-minutes",),
    "--max-absolute-position-embeddings": ("--max-position-embeddings",),  # bigscience, early 2021
    "--kill-switch-file": ("--kill-switch-path",),
    "--train-data": ("--train-data-path",),
    "--deepspeed-activation-checkpointing": ("--recompute-granularity", "full"),
    "--enable-zbh1-pipeline": ("--pipeline-schedule", "zero-bubble"),
    "--quick-geglu": ("--glu-activation", "quick_geglu"),
    "--fp8-e4m3": ("--fp8-format", "e4m3"),
    "--fp8-hybrid": ("--fp8-format", "hybrid"),
    "--disable-fp8-wgrad": ("--fp8-wgrad", "false"),
    "--ds-sequence-parallel-size": ("--cp-comm-type", "a2a", "--context-parallel-size"),
    "--encoder-num-layers": ("--num-layers",),
    "--ict-load": ("--pretrained-checkpoint",),
    "--padded-vocab-size": ("--pad-vocab-size-to",),
    "--no-pad-vocab-size": ("--make-vocab-size-divisible-by", "1"),
    "--disable-pad-vocab-size": ("--make-vocab-size-divisible-by", "1"),
    "--persistent-save-interval": ("--save-interval",),
    "--save-retain-interval": ("--keep-last", "1", "--keep-every"),
    "--check-weight-hash-across-dp-replicas-interval": ("--check-agreement-interval",),
    "--dataloader-inter-document-masking": ("--reset-attention-mask", "true"),
}


class Conversion(NamedTuple):
    """How the values of a flag are written here."""

    meaning: str
    # ValueError for values without counterpart; ConfigError for a file that cannot be read
    words: Callable[[Sequence[str]], tuple[str, ...]]


def _table(flag: str, values: Mapping[str, str]) -> Conversion:
    def words(given: Sequence[str]) -> tuple[str, ...]:
        (value,) = given
        if value not in values:
            raise ValueError(value)
        return flag, values[value]

    return Conversion(", ".join(f"{k} is {flag} {v}" for k, v in values.items()), words)


def _skipped(given: Sequence[str]) -> tuple[str, ...]:
    return "--skip-train-iteration-range", *(f"{int(number)}-{number}" for number in given)


def _profile_steps(given: Sequence[str]) -> tuple[str, ...]:
    (value,) = given
    start, end = value.split(",")
    return "--profile-step-start", start, "--profile-step-end", end


def _window(given: Sequence[str]) -> tuple[str, ...]:
    before, after = (int(number) for number in ",".join(given).strip("()[]").split(","))
    if after != 0 or before < 0:
        raise ValueError(given)
    return "--sliding-window", str(before + 1)


def _graph(given: Sequence[str]) -> tuple[str, ...]:
    scopes = {scope for word in given for scope in word.split(",")}
    if not scopes or not scopes <= {"full_iteration", *_PARTS_OF_LAYERS}:
        raise ValueError(given)
    return ("--cuda-graph",) if "full_iteration" in scopes else ()


_PARTS_OF_LAYERS = ("full", "attn", "mlp", "moe", "moe_router", "moe_preprocess", "mamba")
_FORMAT = _table(
    "--checkpoint-format",
    {"torch": "megatron", "torch_dist": "sharded", "fsdp_dtensor": "sharded"},
)
_STEPS = Conversion("2,3 is --profile-step-start 2 --profile-step-end 3", _profile_steps)

# Flags whose values are written differently here.
CONVERTED: Mapping[str, Conversion] = {
    "--ckpt-format": _FORMAT,
    "--dist-ckpt-format": _FORMAT,
    "--cuda-graph-scope": Conversion(
        f"full_iteration is --cuda-graph; {' '.join(_PARTS_OF_LAYERS)} have no effect, as layers "
        "are not captured one by one",
        _graph,
    ),
    "--data-args-path": Conversion("FILE is --data-path with the words in it", data_path_words),
    "--per-split-data-args-path": Conversion(
        "FILE is --train-data-path, --valid-data-path and --test-data-path with the lists in it",
        paths_of_splits,
    ),
    "--logging-level": _table(
        "--log-level",
        {"10": "debug", "20": "info", "30": "warning", "40": "error", "50": "critical"},
    ),
    "--iterations-to-skip": Conversion("7 9 is --skip-train-iteration-range 7-7 9-9", _skipped),
    "--window-size": Conversion(
        "127,0 is --sliding-window 128, the token itself included", _window
    ),
    "--profile-steps": _STEPS,
    "--profile_steps": _STEPS,
}
