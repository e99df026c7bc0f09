"""What becomes of a config of gpt-neox: a run, or the one thing that is wrong with it."""

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from megatron.arguments import parse_args
from megatron.config.run import RunConfig
from megatron.errors import ConfigError, PreflightError


def run_of(config: Mapping[str, Any], *words: str, world_size: int = 1) -> RunConfig:
    """Return the run of a config, as `--neox-config` reads it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "neox.yml")
        path.write_text(json.dumps(dict(config)))
        return parse_args(["--neox-config", str(path), *words], world_size=world_size)


def problem_of(config: Mapping[str, Any], world_size: int = 1) -> ConfigError:
    """Return what is wrong with a config."""
    with pytest.raises(PreflightError) as caught:
        run_of(config, world_size=world_size)
    (finding,) = caught.value.findings
    assert isinstance(finding.error, ConfigError)
    return finding.error
