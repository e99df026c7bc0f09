"""Whether a program and its flags would run here, with what notes, or why not."""

import contextlib
import io
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

import finetune_t0_non_causal_decoder
import pretrain_bert
import pretrain_gpt
import pretrain_ict
import pretrain_prefix_lm
import pretrain_t5
import pretrain_vit
from megatron.arguments import CommandLineError, parse_args
from megatron.config.fields import default_of, flag_name, to_plain
from megatron.config.models.encoder_decoder import EncoderDecoderConfig
from megatron.config.models.retrieval import RetrievalConfig
from megatron.config.models.vision import VisionConfig
from megatron.config.run import GROUPS, RunConfig
from megatron.data.kinds.program_data import (
    BERT_DATA,
    GPT_DATA,
    PAIRS_DATA,
    PREFIX_DATA,
    ProgramData,
    ict_data,
)
from megatron.data.kinds.t5_data import t5_data
from megatron.data.vision.image_maker import image_data
from megatron.errors import MegatronError, PreflightError
from megatron.launch import Launch
from megatron.preflight import deepspeed
from megatron.preflight.checks import LAYOUT_CHECKS
from megatron.preflight.data import flags_of_data_are_read
from megatron.preflight.run import RunPlan, run_preflight
from tools.launch_scripts.commands import Started, known_name

_ROOT = Path(__file__).resolve().parents[2]
# What each program takes for flags that are not given, and its data.
_PRETRAINING: Mapping[str, tuple[Mapping[str, object], ProgramData]] = {
    "pretrain_gpt.py": ({"tokenizer_type": pretrain_gpt.TOKENIZER_TYPE}, GPT_DATA),
    "pretrain_bert.py": ({"tokenizer_type": pretrain_bert.TOKENIZER_TYPE}, BERT_DATA),
    "pretrain_prefix_lm.py": ({"tokenizer_type": pretrain_prefix_lm.TOKENIZER_TYPE}, PREFIX_DATA),
    "pretrain_t5.py": (
        {"tokenizer_type": pretrain_t5.TOKENIZER_TYPE, **pretrain_t5.DEFAULTS},
        t5_data(EncoderDecoderConfig()),
    ),
    "pretrain_ict.py": (
        {"tokenizer_type": pretrain_ict.TOKENIZER_TYPE},
        ict_data(RetrievalConfig()),  # which kind it is, and what it leaves unread
    ),
    "pretrain_vit.py": (
        {"tokenizer_type": pretrain_vit.TOKENIZER_TYPE, **pretrain_vit.DEFAULTS},
        image_data(VisionConfig()),
    ),
    "finetune_t0_non_causal_decoder.py": (
        {
            "tokenizer_type": pretrain_prefix_lm.TOKENIZER_TYPE,
            **finetune_t0_non_causal_decoder.DEFAULTS,
        },
        PAIRS_DATA,
    ),
}
_SPELLED = {"num_query_groups": "--num-key-value-heads"}  # which needs no switch beside it
_TIME = re.compile(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d ")
# What another Megatron's program is for, where there is none here.
_MISSING = {
    "pretrain_retro.py": "Retro models",
    "pretrain_vision_classify.py": "models of images",
    "pretrain_vision_inpaint.py": "models of images",
    "pretrain_vision_dino.py": "models of images",
    "pretrain_vlm.py": "models of images and text",
    "pretrain_mamba.py": "hybrid models",
    "pretrain_hybrid.py": "hybrid models",
    "train_rl.py": "reinforcement learning",
    "finetune_llama.py": "LLaMA on records of instructions (tools/preprocess_sft.py makes a corpus "
    "of dialogues, which pretrain_gpt.py --sft trains on)",
    "analyze_data.py": "curricula by measured difficulty",
}


class Kind(StrEnum):
    """What would become of a command."""

    WORKS = "works"
    NOTES = "works, with notes"
    REFUSED = "refused"
    UNCHECKED = "program is here, flags are not checked"


class CommandVerdict(NamedTuple):
    """What would become of a command, and why.

    `ours` is the command in the spelling of this project; empty unless it is a pretraining that
    works.
    """

    started: Started
    kind: Kind
    notes: tuple[str, ...] = ()
    reasons: tuple[str, ...] = ()
    ours: tuple[str, ...] = ()


def verdict_of(started: Started) -> CommandVerdict:
    """Return what would become of a command; files that its flags name may be absent."""
    name = known_name(started.program)
    if name in _PRETRAINING or (_ROOT / name).is_file():
        return _of_program(started, name)
    feature = _MISSING.get(name)
    reason = f"no program here trains {feature}" if feature else f"there is no {name} here"
    return CommandVerdict(started, Kind.REFUSED, reasons=(f"{reason}\n  found: {started.program}",))


def _of_program(started: Started, name: str) -> CommandVerdict:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        if name in _PRETRAINING:
            config, errors = _checked_pretraining(started, *_PRETRAINING[name])
        else:
            from tools.launch_scripts.task_flags import check_flags  # imports torch

            checked = check_flags(name, started.flags)
            if checked is None:
                return CommandVerdict(started, Kind.UNCHECKED)
            config, errors = checked.config, checked.errors
            if config is not None:
                errors = _layout_errors(config, started.world_size, BERT_DATA)
    notes = tuple(_TIME.sub("", line) for line in printed.getvalue().splitlines() if line)
    if errors:
        reasons = tuple(str(error) for error in errors)
        return CommandVerdict(started, Kind.REFUSED, notes, reasons)
    ours = (name, *spelled_out(config)) if config is not None and name in _PRETRAINING else ()
    return CommandVerdict(started, Kind.NOTES if notes else Kind.WORKS, notes, ours=ours)


def _checked_pretraining(
    started: Started, defaults: Mapping[str, object], reads: ProgramData
) -> tuple[RunConfig | None, list[MegatronError]]:
    try:
        config = parse_args(
            started.flags,
            args_defaults=defaults,
            world_size=started.world_size,
        )
    except CommandLineError as several:
        return None, [finding.error for finding in several.findings]
    return config, _layout_errors(config, started.world_size, reads)


def _layout_errors(
    config: RunConfig, world_size: int | None, reads: ProgramData
) -> list[MegatronError]:
    if world_size is None:
        return []
    plan = RunPlan(config, Launch(world_size=world_size, local_world_size=world_size), reads=reads)
    try:
        run_preflight(plan, (*LAYOUT_CHECKS, flags_of_data_are_read, *deepspeed.FLAG_CHECKS))
    except PreflightError as several:
        return [finding.error for finding in several.findings]
    return []


def spelled_out(config: RunConfig) -> Iterator[str]:
    """Yield the words of a command line with the values of `config` that are not the defaults."""
    for name, group in GROUPS.items():
        chosen = getattr(config, name)
        plain = to_plain(chosen)
        for field in fields(group):
            value = getattr(chosen, field.name)
            if value == default_of(group, field.name) or value is None:
                continue
            if isinstance(value, bool):
                yield flag_name(field.name) if value else "--no-" + flag_name(field.name)[2:]
                continue
            shown = plain[field.name]
            words: Sequence[object] = shown if isinstance(shown, list) else [shown]
            yield _SPELLED.get(field.name, flag_name(field.name))
            yield from (str(word) for word in words)


def lines_about(verdict: CommandVerdict) -> Iterator[str]:
    """Yield the lines of a page about one command."""
    started = verdict.started
    size = started.world_size
    ranks = {None: "an unknown number of ranks", 1: "1 rank"}.get(size, f"{size} ranks")
    yield f"{started.program} on {ranks}: {verdict.kind}"
    for reason in verdict.reasons:
        yield from ("  " + line for line in f"- {reason}".splitlines())
    if verdict.notes:
        yield "  notes:"
        yield from (f"    {note}" for note in verdict.notes)
    if verdict.ours:
        yield "  the same in our spelling:"
        yield from _wrapped(verdict.ours)


def _wrapped(words: Sequence[str], width: int = 96) -> Iterator[str]:
    """Yield lines of a command, which end with a backslash but for the last."""
    pieces: list[str] = []
    for word in map(shlex.quote, words):
        if word.startswith("--") or not pieces or not pieces[-1].startswith("--"):
            pieces.append(word)
        else:
            pieces[-1] += f" {word}"
    line = "    " + pieces[0]
    for piece in pieces[1:]:
        if len(line) + len(piece) > width:
            yield line + " \\"
            line = "        " + piece
        else:
            line += " " + piece
    yield line
