"""Where checkpoints go and come from: what is refused."""

import pytest

from megatron.config.checkpoint import CheckpointConfig
from megatron.errors import ConfigError


def test_nothing_is_saved_unless_asked_for() -> None:
    config = CheckpointConfig()
    assert config.save is None
    assert config.load is None


@pytest.mark.parametrize("name", ["save_interval", "keep_last"])
def test_counts_are_positive(name: str) -> None:
    with pytest.raises(ConfigError, match=f"it is not positive\n  found: --{name[:4]}"):
        CheckpointConfig(**{"save": "s", name: 0})


def test_an_interval_needs_a_place() -> None:
    with pytest.raises(ConfigError, match="an interval but no place") as caught:
        CheckpointConfig(save_interval=5)
    assert caught.value.found == "--save-interval 5 without --save"


def test_fine_tuning_needs_weights() -> None:
    with pytest.raises(ConfigError, match="fine-tuning needs weights to start from"):
        CheckpointConfig(finetune=True)
