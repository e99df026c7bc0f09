"""The command line: flags from the config groups, Megatron's older spellings, all errors at once.

Nothing here knows what a flag is for; that stands in the config group that owns it. The tables
below are for launch scripts that were written for other Megatrons: each flag in them is an alias,
is accepted and said to have no effect (with the reason), or is refused with its successor.
"""

import argparse
import difflib
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

from megatron import log
from megatron.config.deepspeed_agreement import flags_from_json
from megatron.config.deepspeed_json import read_json
from megatron.config.fields import FieldsError, add_flags, field_names, flag_name, from_flags
from megatron.config.presets import PRESETS
from megatron.config.run import GROUPS, RunConfig
from megatron.errors import ConfigError, Finding, PreflightError

ExtraArgsProvider = Callable[[argparse.ArgumentParser], argparse.ArgumentParser]


class NoEffect(NamedTuple):
    """A flag of another Megatron that changes nothing here."""

    values: int  # how many values follow the flag; -1 for one that may be left out
    because: str
    only: str | None = None  # the one value that asks for nothing; others are refused


_FUSED = "the arithmetic is the same with and without fused kernels"
_FAST = "attention always uses the fastest kernel torch offers"
_DENSE = "every model here is dense"
_TILES = "it saves memory and changes no result; ZeRO stage 3 gathers whole matrices"

# Spellings that stand for one of ours, with its value.
ALIASES: Mapping[str, tuple[str, ...]] = {
    "--checkpoint-activations": ("--recompute-granularity", "full"),
    "--recompute-activations": ("--recompute-granularity", "selective"),
    "--use-rotary-position-embeddings": ("--position-embedding-type", "rope"),
    "--no-position-embedding": ("--position-embedding-type", "none"),
    "--rotary-position-embeddings-theta": ("--rotary-base",),
    "--distributed-timeout": ("--distributed-timeout-minutes",),
    "--kill-switch-file": ("--kill-switch-path",),
    "--train-data": ("--train-data-path",),
    "--deepspeed-activation-checkpointing": ("--recompute-granularity", "full"),
    "--partition-activations": ("--distribute-saved-activations", "true"),
    "--enable-zbh1-pipeline": ("--pipeline-schedule", "zero-bubble"),
}

NO_EFFECT: Mapping[str, NoEffect] = {
    "--local_rank": NoEffect(1, "the launcher's LOCAL_RANK is read from the environment"),
    "--local-rank": NoEffect(1, "the launcher's LOCAL_RANK is read from the environment"),
    "--DDP-impl": NoEffect(1, "there is one data-parallel implementation"),
    "--use-contiguous-buffers-in-ddp": NoEffect(0, "gradient buffers are always contiguous"),
    "--use-cpu-initialization": NoEffect(
        0, "initial values depend on the seed and the parameter's name alone"
    ),
    "--data-impl": NoEffect(1, "corpora are memory-mapped .bin/.idx files"),
    "--mmap-warmup": NoEffect(0, "pages are read when they are first used"),
    "--no-masked-softmax-fusion": NoEffect(0, _FUSED),
    "--no-bias-gelu-fusion": NoEffect(0, _FUSED),
    "--no-bias-dropout-fusion": NoEffect(0, _FUSED),
    "--no-bias-swiglu-fusion": NoEffect(0, _FUSED),
    "--no-rope-fusion": NoEffect(0, _FUSED),
    "--no-gradient-accumulation-fusion": NoEffect(0, _FUSED),
    "--no-persist-layer-norm": NoEffect(0, _FUSED),
    "--use-flash-attn": NoEffect(0, _FAST),
    "--use-flash-attn-v2": NoEffect(0, _FAST),
    "--use-flash-attn-triton": NoEffect(0, _FAST),
    "--use-flash-attn-builder": NoEffect(0, _FAST),
    "--attention-softmax-in-fp32": NoEffect(0, "the softmax of attention is computed in fp32"),
    "--no-query-key-layer-scaling": NoEffect(0, "scores are never scaled by the layer number"),
    "--no-async-tensor-model-parallel-allreduce": NoEffect(0, "overlap does not change results"),
    "--no-scatter-gather-tensors-in-pipeline": NoEffect(0, "stages hand over whole tensors"),
    "--sync-tp-duplicated-parameters": NoEffect(
        0, "replicated parameters stay equal by construction, and are compared"
    ),
    "--transformer-impl": NoEffect(1, "there is one transformer"),
    "--use-mcore-models": NoEffect(0, "there is one GPT"),
    "--use-precision-aware-optimizer": NoEffect(
        0, "--exp-avg-dtype and --exp-avg-sq-dtype choose the dtype of each state"
    ),
    "--log-path": NoEffect(1, "the run's configuration is stored in every checkpoint"),
    "--no-check-for-nan-in-loss-and-grad": NoEffect(0, "the loss and gradient are always checked"),
    "--deepspeed_mpi": NoEffect(0, "the launcher's ranks are read from the environment"),
    "--override-lr-scheduler": NoEffect(0, "the learning rate always follows the flags"),
    "--override-opt_param-scheduler": NoEffect(0, "the learning rate always follows the flags"),
    "--no-load-lr-state": NoEffect(0, "the learning rate always follows the flags"),
    "--exit-on-missing-checkpoint": NoEffect(0, "a checkpoint that is missing is an error"),
    "--valid-num-workers": NoEffect(
        1, "validation is read by as many processes as training; the samples are the same"
    ),
    "--contigious-checkpointing": NoEffect(
        0, "what is saved of recomputed layers is one tensor each already"
    ),
    "--synchronize-each-layer": NoEffect(0, "waiting for each layer changes no result"),
    "--profile-backward": NoEffect(0, "--log-timers-to-tensorboard times forward and backward"),
    "--scattered-embeddings": NoEffect(0, _TILES),
    "--split-transformers": NoEffect(0, _TILES),
    "--memory-centric-tiled-linear": NoEffect(0, _TILES),
    "--tile-factor": NoEffect(1, _TILES),
    "--disable-mem-efficient-ln": NoEffect(0, _FUSED),
    "--overlap-p2p-communication": NoEffect(0, "overlap does not change results"),
    "--enable-zbh1-exact-semantics": NoEffect(0, "a step is applied once its norm is known"),
    "--timing-log-level": NoEffect(1, "timers are those of --log-timers-to-tensorboard"),
    "--timing-log-option": NoEffect(1, "timers are those of --log-timers-to-tensorboard"),
    "--log-optimizer-states-to-tensorboard": NoEffect(
        0, "norms of the optimizer's state are not logged; --log-params-norm logs the weights'"
    ),
    "--ds-sequence-parallel-size": NoEffect(1, "1 is no parallelism of that kind", only="1"),
    "--context-parallel-size": NoEffect(1, "1 is no parallelism of that kind", only="1"),
    "--moe-expert-parallel-size": NoEffect(1, _DENSE, only="1"),
    "--num-experts": NoEffect(1, _DENSE, only="1"),
    "--mlp-type": NoEffect(1, _DENSE, only="standard"),
    **dict.fromkeys(
        (
            "--moe-loss-coeff",
            "--moe-train-capacity-factor",
            "--moe-eval-capacity-factor",
            "--moe-min-capacity",
            "--expert-interval",
            "--topk",
        ),
        NoEffect(1, _DENSE),
    ),
    **dict.fromkeys(
        (
            "--disable-moe-token-dropping",
            "--disable-moe-top2-2nd-expert-sampling",
            "--enable-expert-tensor-parallelism",
            "--use-tutel",
        ),
        NoEffect(0, _DENSE),
    ),
    "--universal-checkpoint": NoEffect(0, "every checkpoint loads at any layout"),
    "--codecarbon-dir": NoEffect(1, "energy is not measured"),
    "--lazy-mpu-init": NoEffect(-1, "groups are made by initialize_megatron"),
    "--abort-on-unmet-fused-kernel-constraints": NoEffect(0, _FUSED),
    "--fim-pad-token": NoEffect(1, "a document that is rearranged keeps its length"),
    "--fim-eod-token": NoEffect(1, "documents end where the tokenizer says so"),
}

REMOVED: Mapping[str, str] = {
    "--batch-size": "--micro-batch-size",
    "--warmup": "--lr-warmup-fraction",
    "--model-parallel-size": "--tensor-model-parallel-size",
}

NOT_YET: Mapping[str, str] = {
    **dict.fromkeys(
        (
            "--bert-load",
            "--biencoder-projection-dim",
            "--biencoder-shared-query-context-model",
            "--block-data-path",
            "--embedding-path",
            "--evidence-data-path",
            "--ict-head-size",
            "--ict-load",
            "--indexer-batch-size",
            "--indexer-log-interval",
            "--retriever-report-topk-accuracies",
            "--retriever-score-scaling",
            "--retriever-seq-length",
            "--sample-rate",
        ),
        "pretrain_gpt.py or pretrain_bert.py; there is no model for retrieval",
    ),
    **dict.fromkeys(
        ("--num-classes", "--img-dim", "--num-channels", "--patch-dim"),
        "pretrain_gpt.py or pretrain_bert.py; there is no model of images",
    ),
    **dict.fromkeys(
        (
            "--kd",
            "--kd-alpha-ce",
            "--kd-beta-ce",
            "--kd-temp",
            "--mos",
            "--num-layers-teacher",
            "--num-experts-teacher",
            "--hidden-size-teacher",
            "--num-attention-heads-teacher",
            "--load-teacher",
            "--reset-iteration",
        ),
        "a run without a teacher; there is no distillation",
    ),
    **dict.fromkeys(
        (
            "--train-data-exact-num-epochs",
            "--return-data-index",
            "--train-idx-path",
            "--train-desc-path",
            "--train-doc-idx-path",
            "--train-sample-idx-path",
            "--train-shuffle-idx-path",
            "--repeated-dataloader",
        ),
        "--data-path and --data-cache-path, which keep sample orders",
    ),
    "--reweight-loss-based-on-position-frequency": "--mtf or --sft, where each token counts once",
    "--inference": "tools/generate_text.py",
    "--load-tag": "--load with the folder of that checkpoint",
    "--trust-remote-code": "a tokenizer that needs no code of its own",
    "--standalone-embedding-stage": "--pipeline-balance parameters",
    "--data-parallel-random-init": "one initial model for all replicas; leave it out",
    "--apply-layernorm-1p": "--normalization LayerNorm",
    "--embedding-weights-in-fp32": "--fp32-residual-connection",
    "--num-experts-switch": "a dense model; leave it out",
    "--ds-sequence-parallel-fpdt": "--sequence-parallel",
    "--create-moe-param-group": "a dense model; leave it out",
    "--force-ds-sequence-parallel": "--sequence-parallel",
    "--data-efficiency-curriculum-learning": "--curriculum-schedule",
    "--random-ltd": "all tokens in every layer; leave it out",
    "--compression-training": "the model as it is; leave it out",
    "--use-checkpoint-opt_param-scheduler": "the schedule flags of the run that saved it",
    "--use-checkpoint-args": "the flags of the run that saved the checkpoint",
    "--use-checkpoint-lr-scheduler": "the schedule flags of the run that saved the checkpoint",
    "--adlr-autoresume": "--exit-signal-handler, which saves on SIGTERM",
    "--adlr-autoresume-interval": "--exit-signal-handler, which saves on SIGTERM",
    "--fp16-lm-cross-entropy": "the loss in fp32; leave it out",
    "--main-params-dtype": "fp32 masters, as every half-precision run does; leave it out",
    "--main-grads-dtype": "gradients in the dtype that they are reduced in; leave it out",
    "--ddp-num-buckets": "--ddp-bucket-size",
    "--fim-split-sample": "--fim-data without it, which takes each document by itself",
    "--fim-fragment-rate": "--fim-rate, the share of all documents",
    "--fim-no-prefix": "--fim-data without it, which treats all documents alike",
    "--sft-tokenizer-prompt-format": "--sft on what tools/preprocess_sft.py wrote",
    "--loss-on-targets-only": "--mtf on pairs of inputs and targets, or --sft on dialogues",
    "--use-bnb-optimizer": "--optimizer adam",
    "--sync-replicas": "--check-agreement-interval",
}


class CommandLineError(PreflightError):
    """Everything wrong with a command line; `config` is the run without it, where there is one."""

    def __init__(self, problems: Iterable[ConfigError], config: RunConfig | None = None) -> None:
        super().__init__(Finding("command_line", error) for error in problems)
        self.config = config


def parse_args(
    argv: Sequence[str] | None = None,
    *,
    extra_args_provider: ExtraArgsProvider | None = None,
    args_defaults: Mapping[str, Any] | None = None,
) -> RunConfig:
    """Turn a command line into a `RunConfig`, or raise one error that lists all that is wrong.

    Args:
        argv: the flags; the program's own when not given.
        extra_args_provider: adds a program's own flags to the parser, as in Megatron.
        args_defaults: values for flags that the command line does not give.

    Raises:
        CommandLineError: with all that is wrong.
    """
    problems: list[ConfigError] = []
    parser = _parser(problems)
    known_to_us = {action.dest for action in parser._actions}
    if extra_args_provider is not None:
        parser = _with_extra_flags(parser, extra_args_provider)
    words = _translate(sys.argv[1:] if argv is None else list(argv), parser, problems)
    try:
        namespace, unknown = parser.parse_known_args(words)
    except ConfigError as error:  # argparse stops at the first flag that lacks its value
        raise CommandLineError([*problems, error]) from None
    problems += _unknown_flags(unknown, parser)
    given = vars(namespace)
    extra = {name: given.pop(name) for name in sorted(given) if name not in known_to_us}
    defaults = dict(args_defaults or {})
    for name in [name for name in extra if name in defaults]:
        default = defaults.pop(name)
        extra[name] = default if extra[name] is None else extra[name]
    problems += _unknown_defaults(set(defaults) - known_to_us)
    typed = {name: value for name, value in given.items() if value is not None}
    preset = _preset(typed.pop("model_preset", None), problems)
    values = defaults | preset | _from_deepspeed(typed, problems) | typed
    groups: dict[str, Any] = {}
    for name, group in GROUPS.items():
        if any(given.get(field, 0) is None for field in field_names(group)):
            continue  # a value could not be read, and `problems` already says so
        try:
            groups[name] = from_flags(group, values)
        except FieldsError as several:
            problems += several.errors
        except ConfigError as error:
            problems.append(error)
    whole = len(groups) == len(GROUPS)
    config = RunConfig(**groups, extra=_jsonable(extra)) if whole else None
    if problems or config is None:
        raise CommandLineError(problems, config)
    return config


def flag_names() -> list[str]:
    """Every flag that has a meaning here, one spelling each, in the order of the groups."""
    return [flag_name(name) for group in GROUPS.values() for name in field_names(group)]


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(
            "a flag is used wrongly", found=message, fix="see --help for what follows each flag"
        )


def _parser(problems: list[ConfigError]) -> argparse.ArgumentParser:
    parser = _Parser(
        allow_abbrev=False,  # a shortened flag would change meaning when a longer one is added
        description="Pretrain a language model. Every flag is listed once, with its default in "
        "brackets.",
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=36, width=100),
        usage="%(prog)s --num-layers N --hidden-size N ... [flags]",
    )
    parser.add_argument(
        "--model-preset",
        default=None,
        help="take the model's shape from a table; flags given beside it win. One of "
        + ", ".join(PRESETS),
    )
    for group in GROUPS.values():
        add_flags(parser, group, problems)
    return parser


def _with_extra_flags(
    parser: argparse.ArgumentParser, provider: ExtraArgsProvider
) -> argparse.ArgumentParser:
    extended = provider(parser)
    if not isinstance(extended, argparse.ArgumentParser):
        raise ConfigError(
            "extra_args_provider did not return the parser",
            found=f"{getattr(provider, '__name__', provider)} returned {type(extended).__name__}",
            fix="end the function with `return parser`",
        )
    return extended


def _translate(
    argv: list[str], parser: argparse.ArgumentParser, problems: list[ConfigError]
) -> list[str]:
    """Replace legacy spellings, drop flags without effect (saying so), note refused ones."""
    words: list[str] = []
    rest = [part for word in argv for part in _split_equals(word)]
    while rest:
        word = rest.pop(0)
        if word in parser._option_string_actions:
            words.append(word)
        elif word in ALIASES:
            words += ALIASES[word]
        elif word in NO_EFFECT:
            values, because, only = NO_EFFECT[word]
            if values == -1:
                values = int(bool(rest) and not rest[0].startswith("--"))
            given = " ".join([word, *rest[:values]])
            asks_for_more = only is not None and rest[:1] != [only]
            del rest[:values]
            if asks_for_more:
                problems.append(_refusal(given, f"{word} {only}, or leave it out"))
            else:
                log.info(f"{given}: accepted, has no effect here because {because}")
        elif word in REMOVED or word in NOT_YET:
            while rest and not rest[0].startswith("--"):
                rest.pop(0)
            problems.append(_removed(word) if word in REMOVED else _refusal(word, NOT_YET[word]))
        else:
            words.append(word)
    return words


def _removed(word: str) -> ConfigError:
    return ConfigError("this flag was removed long ago", found=word, fix=f"use {REMOVED[word]}")


def _refusal(given: str, instead: str) -> ConfigError:
    return ConfigError(
        "this flag is of a feature that this version does not have",
        found=given,
        fix=f"use {instead}",
    )


def _split_equals(word: str) -> list[str]:
    if word.startswith("--") and "=" in word:
        name, _, value = word.partition("=")
        return [name, value]
    return [word]


def _unknown_flags(unknown: Iterable[str], parser: argparse.ArgumentParser) -> list[ConfigError]:
    names = [name for name in parser._option_string_actions if name.startswith("--")]
    problems = []
    after_unknown_flag = False  # then the word is that flag's value, and not worth a line
    for word in unknown:
        if not word.startswith("-") or _is_number(word):
            if after_unknown_flag:
                continue
            problems.append(
                ConfigError(
                    "a word on the command line belongs to no flag",
                    found=word,
                    fix="put a flag before it, or quote it together with the word before",
                )
            )
            continue
        after_unknown_flag = True
        near = difflib.get_close_matches(word, [*names, *ALIASES], n=1, cutoff=0.5)
        problems.append(
            ConfigError(
                "there is no such flag",
                found=word,
                fix=f"did you mean {near[0]}?" if near else "see --help for every flag",
            )
        )
    return problems


def _unknown_defaults(names: Iterable[str]) -> list[ConfigError]:
    return [
        ConfigError(
            "args_defaults gives a value to a flag that does not exist",
            found=name,
            fix="use the flag's name with underscores, as in get_args()",
        )
        for name in sorted(names)
    ]


def _from_deepspeed(typed: Mapping[str, Any], problems: list[ConfigError]) -> dict[str, Any]:
    """What DeepSpeed's JSON says as values of flags that were not typed; each is said once."""
    path = typed.get("deepspeed_config")
    if path is None or not typed.get("deepspeed"):
        return {}
    try:
        said = flags_from_json(read_json(path), typed)
    except FieldsError as several:
        problems += several.errors
        return {}
    except ConfigError as error:
        problems.append(error)
        return {}
    for name, value in said.items():
        log.info(f"{flag_name(name)} {value}: from {path}, as the flag is not given")
    return said


def _preset(name: str | None, problems: list[ConfigError]) -> dict[str, Any]:
    if name is None:
        return {}
    if name not in PRESETS:
        near = difflib.get_close_matches(name, PRESETS, n=1, cutoff=0.0)[0]
        problems.append(
            ConfigError(
                "there is no such model preset",
                found=f"--model-preset {name}",
                fix=f"did you mean {near}? The presets are {', '.join(PRESETS)}",
            )
        )
        return {}
    return dict(PRESETS[name])


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def _jsonable(extra: Mapping[str, Any]) -> dict[str, Any]:
    for name, value in extra.items():
        try:
            json.dumps(value)
        except TypeError:
            raise ConfigError(
                "a program's own flag holds a value that a checkpoint cannot record",
                found=f"--{name.replace('_', '-')} of type {type(value).__name__}",
                fix="use a text, a number, a boolean or a list of them as the flag's type",
            ) from None
    return dict(extra)
