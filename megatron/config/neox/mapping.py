"""From the keys of gpt-neox's config files to fields of ours: pure, apart from reading the files.

The table is `keys.KEYS`. Every key of neox that changes a run is given, so that neox's defaults
hold where a config says nothing, not ours.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from megatron.config.files.reading import SUFFIXES, Content, read_content
from megatron.config.neox.batches import batch_sizes, replicas
from megatron.config.neox.course import COURSE
from megatron.config.neox.keys import KEYS, IgnoredKey, RefusedKey, SameKey
from megatron.config.neox.network import NETWORK, Meant
from megatron.config.neox.reader import KeyReader, RefusedKeyError
from megatron.errors import ConfigError
from megatron.json_values import JsonValue

FLAG = "--neox-config"


class NeoxConfig(NamedTuple):
    """What gpt-neox's files say: fields of ours, what has no effect here, and what is wrong.

    Args:
        places: for each field the key that it comes from, and where that stands.
    """

    values: Mapping[str, JsonValue]
    places: Mapping[str, str]
    notes: tuple[str, ...]
    problems: tuple[ConfigError, ...]


def read_neox(paths: Sequence[str], *, world_size: int | None) -> NeoxConfig:
    """Read gpt-neox's files, which together are one config, for so many ranks.

    Without a number of ranks the sizes of batches are not looked at, as for a run that is over.

    As in neox a name without .yml or .json has .yml, and no two files have the same key; unlike
    there `train-iters` and `train_iters` are the same key.
    """
    problems: list[ConfigError] = []
    config: dict[str, JsonValue] = {}
    places: dict[str, str] = {}
    for path in paths:
        try:
            content = read_content(
                path if Path(path).suffix in SUFFIXES else f"{path}.yml", flag=FLAG
            )
        except ConfigError as error:
            problems.append(error)
            continue
        problems += _merge(config, places, content)
    if problems:
        return NeoxConfig({}, {}, (), tuple(problems))
    return mapped(config, places, world_size=world_size)


def mapped(
    config: Mapping[str, JsonValue], places: Mapping[str, str], *, world_size: int | None
) -> NeoxConfig:
    """Return what a config means here.

    Args:
        config: keys with underscores.
        places: where each key stands, for messages.
    """
    reader = KeyReader(config, places.__getitem__)
    found: list[Meant] = []
    notes = []
    for key, value in config.items():
        rule = KEYS.get(key)
        if rule is None:
            reader.problems.append(reader.unknown(key))
        elif isinstance(rule, RefusedKey) and not _is_harmless(value, rule):
            problem = f"gpt-neox's config asks for what this version does not have: {rule.feature}"
            reader.problems.append(reader.problem(key, problem, rule.instead))
        elif isinstance(rule, IgnoredKey) and value is not None:
            notes.append(f"{key}: accepted, has no effect here because {rule.because}")
    for key, rule in KEYS.items():
        if isinstance(rule, SameKey):
            value = config.get(key)
            found.append(Meant(rule.field, rule.default if value is None else value, key))
    for part in (*NETWORK, *COURSE):
        try:
            found += part(reader)
        except RefusedKeyError:
            continue  # `reader.problems` has it
    try:
        found += [] if world_size is None else _batches(reader, world_size)
    except RefusedKeyError:
        pass
    except ConfigError as error:
        reader.problems.append(error)
    values = {meant.field: meant.value for meant in found if meant.value not in (None, [])}
    of = {meant.field: meant.key for meant in found}
    return NeoxConfig(
        values,
        {
            field: f"{of[field]}: {places.get(of[field], 'the default of gpt-neox')}"
            for field in values
        },
        tuple(notes),
        tuple(reader.problems),
    )


def _merge(
    config: dict[str, JsonValue], places: dict[str, str], content: Content
) -> Iterator[ConfigError]:
    for spelled, value in content.values.items():
        key = spelled.replace("-", "_")
        if key in config:
            yield ConfigError(
                "a key stands in gpt-neox's config files twice",
                found=f"{key} ({places[key]}), {spelled} ({content.place(spelled)})",
                fix="keep one of the two: neox takes the last, or ends with an error",
            )
            continue
        config[key], places[key] = value, content.place(spelled)


def _is_harmless(value: JsonValue, rule: RefusedKey) -> bool:
    plain = value.lower() if isinstance(value, str) else value
    return any(
        plain == one and isinstance(plain, bool) is isinstance(one, bool) for one in rule.harmless
    )


def _batches(reader: KeyReader, world_size: int) -> Iterator[Meant]:
    ranks = reader.whole("global_num_gpus")
    if ranks not in (None, world_size):
        problem = f"the config is for another number of ranks than the {world_size} that there are"
        reader.refuse("global_num_gpus", problem, f"start {ranks} ranks, or leave it out")
    accumulation = reader.whole("gradient_accumulation_steps")
    if reader.is_null("gradient_accumulation_steps"):
        accumulation = None
    sizes = batch_sizes(
        train=reader.whole("train_batch_size"),
        micro=reader.whole("train_micro_batch_size_per_gpu"),
        accumulation=accumulation,
        replicas=replicas(
            world_size,
            pipeline=reader.whole("pipe_parallel_size") or 0,
            tensor=reader.whole("model_parallel_size") or 1,
        ),
    )
    yield Meant("micro_batch_size", sizes.micro, "train_micro_batch_size_per_gpu")
    yield Meant("global_batch_size", sizes.train, "train_batch_size")
