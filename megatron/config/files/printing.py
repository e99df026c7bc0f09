"""A run's configuration as a config file of YAML, which `--config` reads back to the same run."""

from collections.abc import Mapping

from megatron.config.files.words import EXTRA
from megatron.config.run import GROUPS
from megatron.json_values import JsonObject


def config_file(config: Mapping[str, JsonObject]) -> str:
    """Return a YAML text of every group of a config, as `RunConfig.to_plain` and checkpoints have.

    What a checkpoint records beside the groups is left out.
    """
    from megatron.config.files.yaml_text import to_yaml

    names = [name for name in (*GROUPS, EXTRA) if config.get(name)]
    return to_yaml({name: config[name] for name in names})
