"""CheckpointConfig: where checkpoints go and come from, and which parts of them."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from megatron.config.fields import check_field, flag, raise_all
from megatron.errors import ConfigError


class Verification(StrEnum):
    """What is compared with the manifest before a checkpoint's files are read."""

    SIZE = "size"
    FULL = "full"


class LoadFallback(StrEnum):
    """Where a run continues when the requested checkpoint is damaged."""

    PREVIOUS = "previous"


class CheckpointFormatName(StrEnum):
    """Formats that runs save in; `checkpoint/formats/registry.py` has a record of each."""

    SHARDED = "sharded"
    MEGATRON = "megatron"
    DEEPSPEED = "deepspeed"


class MegatronNames(StrEnum):
    """Names of parameters in Megatron-LM's files of ranks, which depend on what loads them."""

    LEGACY = "legacy"
    CORE = "core"
    CORE_LOCAL = "core-local"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointConfig:
    """Where checkpoints go and come from."""

    save: str | None = flag(
        None, help="folder to save checkpoints in, or an address such as s3://BUCKET/FOLDER"
    )
    load: str | None = flag(
        None,
        help="folder to load the newest checkpoint from; the run starts fresh only when it is "
        "also --save and has never held one",
    )
    pretrained_checkpoint: str | None = flag(
        None,
        help="folder of weights to begin with, as with --finetune, while --load holds no "
        "checkpoint of this run",
    )
    use_checkpoint_args: bool = flag(
        False,
        help="take flags of the model, of its tokenizer and --seq-length that are not given from "
        "the checkpoint to begin with, of any format",
    )
    use_tokenizer_model_from_checkpoint_args: bool = flag(
        True,
        help="with --use-checkpoint-args: take the flags of the tokenizer too",
        off=("--disable-use-tokenizer-model-from-checkpoint-args",),
    )
    use_mp_args_from_checkpoint_args: bool = flag(
        False, help="with --use-checkpoint-args: take the layout of the ranks too"
    )
    checkpoint_format: CheckpointFormatName = flag(
        CheckpointFormatName.SHARDED,
        help="what --save writes: our sharded format, the files of Megatron-LM (mp_rank_*), or "
        "those of DeepSpeed; --load detects the format by itself",
    )
    megatron_names: MegatronNames = flag(
        MegatronNames.LEGACY,
        help="names of parameters with --checkpoint-format megatron: legacy for forks of "
        "Megatron-LM, core for current Megatron-LM, core-local for its --transformer-impl local",
    )
    save_interval: int | None = flag(
        None, help="iterations between checkpoints; when not set only at the end"
    )
    extra_save_iters: tuple[int, ...] = flag(
        (), help="iterations after which a checkpoint is saved too, beside those of save-interval"
    )
    save_optim: bool = flag(True, help="save the optimizer's state")
    save_rng: bool = flag(True, help="save the random generators")
    load_optim: bool = flag(True, help="load the optimizer's state")
    load_rng: bool = flag(True, help="load the random generators")
    finetune: bool = flag(False, help="load only the weights and start at iteration 0 of new data")
    keep_last: int | None = flag(
        None, help="newest checkpoints to keep; when not set every one is kept"
    )
    keep_every: int | None = flag(
        None, help="with --keep-last: also keep every checkpoint of a multiple of this iteration"
    )
    keep_best: int | None = flag(
        None,
        help="with --keep-last: also keep so many checkpoints of the lowest validation loss; those "
        "saved right after an evaluation have one",
    )
    async_save: bool = flag(
        False,
        help="write checkpoints beside the training, which stops only while its state is copied "
        "to host memory; one is written at a time",
    )
    non_persistent_save_interval: int | None = flag(
        None,
        help="iterations between local checkpoints: each rank saves its state on its own node, and "
        "a restart goes on from there where that is newer than what is in --save",
    )
    non_persistent_local_ckpt_dir: str | None = flag(
        None,
        help="folder for local checkpoints, of each node's own; in memory: /dev/shm/NAME",
    )
    replication: bool = flag(
        False, help="keep a copy of each local checkpoint on other nodes, for when a node is lost"
    )
    replication_jump: int | None = flag(
        None,
        help="with --replication: from a rank to the next one that holds a copy of its state; "
        "usually the number of ranks of a node",
    )
    replication_factor: int = flag(
        2, help="with --replication: how many nodes hold the state of a rank, its own included"
    )
    checkpoint_verify: Verification = flag(
        Verification.FULL,
        help="what is compared before a checkpoint is read: the length of each file, or lengths "
        "and digests",
    )
    load_iteration: int | None = flag(
        None,
        help="iteration to load; when not set the one that the tracker file names",
        aliases=("--ckpt-step",),
    )
    load_fallback: LoadFallback | None = flag(
        None,
        help="previous: where the checkpoint to load is damaged or incomplete, go to the newest "
        "whole one before it, and say so; when not set that ends the run",
    )
    load_only: tuple[str, ...] = flag(
        (),
        help="load only parameters whose names match one of these patterns (* and ? stand for any "
        "text); the others keep their initial values",
    )
    load_except: tuple[str, ...] = flag(
        (), help="leave parameters whose names match one of these patterns at initial values"
    )

    def __post_init__(self) -> None:
        raise_all(self._problems())

    def _problems(self) -> Iterator[ConfigError]:
        for name in (
            *("save_interval", "keep_last", "keep_every", "keep_best"),
            *("non_persistent_save_interval", "replication_jump"),
        ):
            value = getattr(self, name)
            if value is not None:
                yield from check_field(
                    value > 0, name, value, problem="it is not positive", fix="use 1 or more"
                )
        for iteration in self.extra_save_iters:
            yield from check_field(
                iteration > 0,
                "extra_save_iters",
                iteration,
                problem="it is not positive",
                fix="use 1 or more: initial values follow from --seed",
            )
        if (
            self.megatron_names is not MegatronNames.LEGACY
            and self.checkpoint_format is not CheckpointFormatName.MEGATRON
        ):
            yield ConfigError(
                "names in Megatron-LM's files were chosen, and no such files are written",
                found=f"--megatron-names {self.megatron_names} with --checkpoint-format "
                f"{self.checkpoint_format}",
                fix="add --checkpoint-format megatron, or leave it out",
            )
        yield from self._problems_of_retention()
        yield from self._problems_of_local_checkpoints()
        yield from self._problems_of_loading()

    def _problems_of_retention(self) -> Iterator[ConfigError]:
        more = {"--keep-every": self.keep_every, "--keep-best": self.keep_best}
        asked = [f"{name} {value}" for name, value in more.items() if value is not None]
        if asked and self.keep_last is None:
            yield ConfigError(
                "checkpoints are to be kept that nothing would remove",
                found=f"{', '.join(asked)} without --keep-last",
                fix="add --keep-last 2, or drop it: without --keep-last every checkpoint is kept",
            )
        if self.extra_save_iters and self.keep_best is not None:
            yield ConfigError(
                "checkpoints would be saved whose validation loss is not known",
                found=f"--extra-save-iters {' '.join(map(str, self.extra_save_iters))} with "
                f"--keep-best {self.keep_best}",
                fix="leave one of the two out",
            )
        if self.async_save and self.save is None:
            yield ConfigError(
                "checkpoints are to be written beside the training, but to no place",
                found="--async-save without --save",
                fix="add --save FOLDER, or drop --async-save",
            )

    def _problems_of_local_checkpoints(self) -> Iterator[ConfigError]:
        interval, folder = self.non_persistent_save_interval, self.non_persistent_local_ckpt_dir
        if interval is None:
            beside = [
                *(["--non-persistent-local-ckpt-dir"] if folder is not None else []),
                *(["--replication"] if self.replication else []),
            ]
            if beside:
                yield ConfigError(
                    "flags say where local checkpoints are kept, and none are saved",
                    found=f"{', '.join(beside)} without --non-persistent-save-interval",
                    fix="add --non-persistent-save-interval N, or leave them out",
                )
        elif folder is None or "://" in folder:
            yield ConfigError(
                "local checkpoints need a folder of each node's own",
                found=f"--non-persistent-save-interval {interval} with "
                f"--non-persistent-local-ckpt-dir {folder}",
                fix="add --non-persistent-local-ckpt-dir /dev/shm/NAME",
            )
        elif self.save is None or self.load != self.save or self._begins_anew:
            yield ConfigError(
                "no restart would go on from local checkpoints",
                found=f"--non-persistent-save-interval {interval} with --save {self.save}, --load "
                f"{self.load}{''.join(f', {flag}' for flag in self._begins_anew)}",
                fix="give the same folder as --save and as --load, and weights to begin with as "
                "--pretrained-checkpoint",
            )
        if self.replication and self.replication_jump is None:
            yield ConfigError(
                "it is not said which ranks hold copies of local checkpoints",
                found="--replication without --replication-jump",
                fix="add --replication-jump N, with the number of ranks of a node",
            )
        yield from check_field(
            self.replication_factor > 1,
            "replication_factor",
            self.replication_factor,
            problem="a rank's own node is one of them",
            fix="use 2 or more, or drop --replication",
        )

    @property
    def _begins_anew(self) -> list[str]:
        """Flags with which a restart does not continue where the run was."""
        flags = {
            "--finetune": self.finetune,
            "--load-iteration": self.load_iteration is not None,
            "--no-load-optim": not self.load_optim,
            "--no-load-rng": not self.load_rng,
            "--no-save-optim": not self.save_optim,
            "--no-save-rng": not self.save_rng,
            "--checkpoint-format": self.checkpoint_format is not CheckpointFormatName.SHARDED,
        }
        return [flag for flag, is_given in flags.items() if is_given]

    def _problems_of_loading(self) -> Iterator[ConfigError]:
        if self.use_mp_args_from_checkpoint_args and not self.use_checkpoint_args:
            yield ConfigError(
                "the layout is to be that of a checkpoint whose flags are not taken",
                found="--use-mp-args-from-checkpoint-args without --use-checkpoint-args",
                fix="add --use-checkpoint-args, or leave it out",
            )
        if self.load_iteration is not None:
            yield from check_field(
                self.load_iteration >= 0,
                "load_iteration",
                self.load_iteration,
                problem="there is no such iteration",
                fix="use 0 or more",
            )
        patterns = {"--load-only": self.load_only, "--load-except": self.load_except}
        partial = [name for name, given in patterns.items() if given]
        given = [
            *(["--load-iteration"] if self.load_iteration is not None else []),
            *(["--load-fallback"] if self.load_fallback is not None else []),
            *(partial if self.pretrained_checkpoint is None else []),
        ]
        if given and self.load is None:
            yield ConfigError(
                "flags say which part to load, and --load is missing",
                found=f"{', '.join(given)} without --load",
                fix="add --load FOLDER",
            )
        begins_anew = self.finetune or self.pretrained_checkpoint is not None
        if partial and self.load_optim and not begins_anew:
            yield ConfigError(
                "the optimizer's state of a part of the parameters is not that of any run",
                found=f"{' and '.join(partial)} without --finetune or --no-load-optim",
                fix="add --finetune to start over with these weights, or --no-load-optim",
            )
