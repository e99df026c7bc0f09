"""Where checkpoints go and come from: what is refused."""

import pytest

from megatron.config.checkpoint import (
    CheckpointConfig,
    CheckpointFormatName,
    LoadFallback,
    MegatronNames,
)
from megatron.errors import ConfigError

LOCAL = {
    "save": "s",
    "load": "s",
    "non_persistent_save_interval": 2,
    "non_persistent_local_ckpt_dir": "/dev/shm/m",
}
WITH = "--non-persistent-save-interval 2 with "
SAME = WITH + "--save s, --load s"


def test_nothing_is_saved_unless_asked_for() -> None:
    config = CheckpointConfig()
    assert config.save is None
    assert config.load is None


@pytest.mark.parametrize(
    "name",
    [
        *("save_interval", "keep_last", "keep_every", "keep_best"),
        *("non_persistent_save_interval", "replication_jump"),
    ],
)
def test_counts_are_positive(name: str) -> None:
    with pytest.raises(ConfigError, match=f"it is not positive\n  found: --{name[:3]}"):
        CheckpointConfig(**{**LOCAL, name: 0})


@pytest.mark.parametrize(
    ("flags", "problem", "found"),
    [
        (
            {"save": "s", "keep_every": 5, "keep_best": 2},
            "that nothing would remove",
            "--keep-every 5, --keep-best 2 without --keep-last",
        ),
        ({"extra_save_iters": (4, 0)}, "it is not positive", "--extra-save-iters 0"),
        (
            {"save": "s", "keep_last": 1, "keep_best": 1, "extra_save_iters": (1, 2)},
            "whose validation loss is not known",
            "--extra-save-iters 1 2 with --keep-best 1",
        ),
        ({"async_save": True}, "but to no place", "--async-save without --save"),
        (
            {"load_iteration": 5, "load_fallback": LoadFallback.PREVIOUS},
            "--load is missing",
            "--load-iteration, --load-fallback without --load",
        ),
        (
            {"replication": True, "replication_jump": 2, "non_persistent_local_ckpt_dir": "m"},
            "and none are saved",
            "--non-persistent-local-ckpt-dir, --replication without --non-persistent-save-interval",
        ),
        (
            {"save": "s", "load": "s", "non_persistent_save_interval": 2},
            "a folder of each node's own",
            WITH + "--non-persistent-local-ckpt-dir None",
        ),
        (
            {**LOCAL, "non_persistent_local_ckpt_dir": "s3://bucket/m"},
            "a folder of each node's own",
            WITH + "--non-persistent-local-ckpt-dir s3://bucket/m",
        ),
        ({**LOCAL, "load": "other"}, "no restart would go on", WITH + "--save s, --load other"),
        (
            {**LOCAL, "save": None, "load": None},
            "no restart would go on",
            WITH + "--save None, --load None",
        ),
        (
            {**LOCAL, "save_rng": False},
            "no restart would go on",
            SAME + ", --no-save-rng",
        ),
        (
            {**LOCAL, "load_iteration": 5},
            "no restart would go on",
            SAME + ", --load-iteration",
        ),
        (
            {**LOCAL, "finetune": True},
            "no restart would go on",
            SAME + ", --finetune",
        ),
        (
            {**LOCAL, "checkpoint_format": CheckpointFormatName.MEGATRON},
            "no restart would go on",
            SAME + ", --checkpoint-format",
        ),
        (
            {**LOCAL, "replication": True},
            "which ranks hold copies",
            "--replication without --replication-jump",
        ),
        (
            {**LOCAL, "replication": True, "replication_jump": 2, "replication_factor": 1},
            "own node is one of them",
            "--replication-factor 1",
        ),
        ({"load": "l", "load_iteration": -1}, "no such iteration", "--load-iteration -1"),
        (
            {"load": "l", "load_only": ("a",), "load_except": ("b",)},
            "not that of any run",
            "--load-only and --load-except without --finetune or --no-load-optim",
        ),
    ],
)
def test_what_makes_no_sense_together_is_refused(flags, problem, found) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigError, match=problem) as caught:
        CheckpointConfig(**flags)
    assert caught.value.found == found


def test_parts_are_loaded_to_start_over_or_without_the_optimizer() -> None:
    assert CheckpointConfig(load="l", load_only=("a",), finetune=True).load_only == ("a",)
    assert CheckpointConfig(load="l", load_except=("a",), load_optim=False).load_except == ("a",)


def test_names_in_megatrons_files_are_chosen_where_such_files_are_written() -> None:
    with pytest.raises(ConfigError, match="no such files are written") as error:
        CheckpointConfig(megatron_names=MegatronNames.CORE)
    assert str(error.value.found) == "--megatron-names core with --checkpoint-format sharded"
    form = CheckpointFormatName.MEGATRON
    chosen = CheckpointConfig(megatron_names=MegatronNames.CORE, checkpoint_format=form)
    assert chosen.megatron_names == "core"
