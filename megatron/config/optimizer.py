"""OptimizerConfig and ScheduleConfig: how gradients become updates, and how fast."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum

from megatron.config.fields import check_field, flag, raise_all
from megatron.errors import ConfigError

_DECAY_RATES = (
    *("adam_beta1", "adam_beta2", "sgd_momentum"),
    *("lion_beta1", "lion_beta2", "muon_momentum"),
)
BF16_ROUNDING = 2.0**-8  # largest relative error of rounding to bfloat16's 8 significant bits


class OptimizerKind(StrEnum):
    """Rule that turns a gradient into an update."""

    ADAM = "adam"
    SGD = "sgd"
    LION = "lion"
    MUON = "muon"


class MuonScaleMode(StrEnum):
    """How far an orthogonal update of a matrix of `rows` x `columns` goes."""

    SPECTRAL = "spectral"  # max(rows, columns)^0.5
    UNIT_RMS_NORM = "unit_rms_norm"  # (rows / columns)^0.5
    SHAPE_SCALING = "shape_scaling"  # max(1, rows / columns)^0.5


class MuonCoefficients(StrEnum):
    """Coefficients of the polynomial of each step of Muon's Newton-Schulz iteration."""

    SIMPLE = "simple"
    QUINTIC = "quintic"


class StateDtype(StrEnum):
    """Dtype of the optimizer's state between updates."""

    FP32 = "fp32"
    BF16 = "bf16"


class DecayStyle(StrEnum):
    """Shape of the learning rate after warm-up."""

    CONSTANT = "constant"
    LINEAR = "linear"
    COSINE = "cosine"
    INVERSE_SQUARE_ROOT = "inverse-square-root"
    WSD = "WSD"


class WsdDecayStyle(StrEnum):
    """Shape of the last part of a warm-up, stable, decay schedule."""

    LINEAR = "linear"
    COSINE = "cosine"
    EXPONENTIAL = "exponential"
    MINUS_SQRT = "minus_sqrt"


class WeightDecayStyle(StrEnum):
    """Shape of the weight decay from its start to its end value."""

    CONSTANT = "constant"
    LINEAR = "linear"
    COSINE = "cosine"


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerConfig:
    """How gradients become updates."""

    optimizer: OptimizerKind = flag(
        OptimizerKind.ADAM,
        help="adam is AdamW (decoupled weight decay); sgd has momentum; lion updates by signs; "
        "muon by orthogonalized matrices, and all that is no matrix by --muon-scalar-optimizer",
    )
    weight_decay: float = flag(0.01, help="decay of weights; biases and norms are never decayed")
    adam_beta1: float = flag(0.9, help="decay of AdamW's running mean of gradients")
    adam_beta2: float = flag(0.999, help="decay of AdamW's running mean of squared gradients")
    adam_eps: float = flag(1e-8, help="added to the root of AdamW's second moment")
    exp_avg_dtype: StateDtype = flag(
        StateDtype.FP32, help="dtype that AdamW's mean of gradients is kept in"
    )
    exp_avg_sq_dtype: StateDtype = flag(
        StateDtype.FP32, help="dtype that AdamW's mean of squared gradients is kept in"
    )
    sgd_momentum: float = flag(0.9, help="momentum of SGD")
    lion_beta1: float = flag(
        0.95, help="share of Lion's mean of gradients in the sum whose sign is the update"
    )
    lion_beta2: float = flag(0.98, help="decay of Lion's running mean of gradients")
    muon_momentum: float = flag(0.95, help="decay of Muon's running mean of gradients")
    muon_nesterov: bool = flag(
        False, help="Muon orthogonalizes the mean after one step more with the same gradient"
    )
    muon_no_split_qkv: bool = flag(
        False, help="Muon takes queries, keys and values as one matrix, not as three"
    )
    muon_scale_mode: MuonScaleMode = flag(
        MuonScaleMode.SPECTRAL,
        help="how far Muon's update of a matrix goes: spectral max(rows, columns)^0.5, "
        "unit_rms_norm (rows / columns)^0.5, shape_scaling max(1, rows / columns)^0.5",
    )
    muon_extra_scale_factor: float = flag(
        1.0, help="factor on it; 0.2 with spectral is about the size of AdamW's updates"
    )
    muon_num_ns_steps: int = flag(5, help="steps of Muon's Newton-Schulz iteration")
    muon_coefficient_type: MuonCoefficients = flag(
        MuonCoefficients.QUINTIC, help="its coefficients: the same or others in each step"
    )
    muon_scalar_optimizer: OptimizerKind = flag(
        OptimizerKind.ADAM,
        help="adam or lion: updates embeddings, output layer, biases and norms beside Muon",
    )
    clip_grad: float = flag(1.0, help="largest global L2 norm of the gradient; 0 does not clip")
    optimizer_cpu_offload: bool = flag(
        False,
        help="AdamW's state and the fp32 weights of a half-precision model wait in host memory, "
        "and come to the device part by part for an update",
    )
    optimizer_offload_fraction: float = flag(
        1.0, help="share of them that waits there, 0 to 1, with --optimizer-cpu-offload"
    )

    def __post_init__(self) -> None:
        raise_all(self._problems())

    def _problems(self) -> Iterator[ConfigError]:
        for name in _DECAY_RATES:
            value = getattr(self, name)
            yield from check_field(
                0 <= value < 1,
                name,
                value,
                problem="a decay rate of the optimizer is outside [0, 1)",
                fix="use a number such as 0.9",
            )
        for name in ("weight_decay", "adam_eps", "clip_grad"):
            value = getattr(self, name)
            yield from check_field(
                value >= 0, name, value, problem="it cannot be negative", fix="use 0 or more"
            )
        yield from self._muon_problems()
        yield from check_field(
            0 <= self.optimizer_offload_fraction <= 1,
            "optimizer_offload_fraction",
            self.optimizer_offload_fraction,
            problem="a share of the optimizer's state is outside [0, 1]",
            fix="use 1 for all of it",
        )
        if self.optimizer_offload_fraction != 1 and not self.optimizer_cpu_offload:
            yield ConfigError(
                "a share of the optimizer's state was named, and none of it leaves the device",
                found=f"--optimizer-offload-fraction {self.optimizer_offload_fraction} without "
                "--optimizer-cpu-offload",
                fix="add --optimizer-cpu-offload, or leave it out",
            )
        if self.optimizer_cpu_offload and self.optimizer is not OptimizerKind.ADAM:
            yield ConfigError(
                "only the state of AdamW can wait in host memory",
                found=f"--optimizer-cpu-offload with --optimizer {self.optimizer}",
                fix="leave out --optimizer-cpu-offload, or use --optimizer adam",
            )
        for name, beta in (("exp_avg", "adam_beta1"), ("exp_avg_sq", "adam_beta2")):
            if getattr(self, f"{name}_dtype") is StateDtype.BF16:
                yield from self._narrow_problems(name, beta)

    def _muon_problems(self) -> Iterator[ConfigError]:
        for name, fix in (("muon_extra_scale_factor", "0.2"), ("muon_num_ns_steps", "5")):
            value = getattr(self, name)
            yield from check_field(
                value > 0, name, value, problem="it is not positive", fix=f"use {fix}"
            )
        if self.muon_scalar_optimizer not in (OptimizerKind.ADAM, OptimizerKind.LION):
            yield ConfigError(
                "what is no matrix cannot be updated by this rule beside Muon",
                found=f"--muon-scalar-optimizer {self.muon_scalar_optimizer}",
                fix="use adam or lion",
            )

    def _narrow_problems(self, name: str, beta: str) -> Iterator[ConfigError]:
        """Yield the errors of keeping a running mean in bfloat16.

        Its values lie up to 2^-7 apart, relative to their size. A mean that decays by no more than
        half of that is rounded back to its old value, so it never changes.
        """
        flag_, value = f"--{name.replace('_', '-')}-dtype", getattr(self, beta)
        if self.optimizer is not OptimizerKind.ADAM:
            yield ConfigError(
                "a dtype was given for state that this optimizer does not have",
                found=f"{flag_} bf16 with --optimizer {self.optimizer}",
                fix=f"drop {flag_}, or use --optimizer adam",
            )
        elif 1 - value <= BF16_ROUNDING:
            yield ConfigError(
                "a running mean that decays this slowly is rounded back up in bf16, for ever",
                found=f"{flag_} bf16 with --{beta.replace('_', '-')} {value}",
                fix=f"use --{beta.replace('_', '-')} 0.995 or less, or {flag_} fp32",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleConfig:
    """Learning rate and weight decay as functions of samples seen."""

    lr: float = flag(help="peak learning rate")
    min_lr: float = flag(0.0, help="learning rate that decay ends at")
    decoupled_lr: float | None = flag(
        None, help="peak learning rate of the word embedding and the output layer alone"
    )
    decoupled_min_lr: float | None = flag(
        None, help="learning rate that theirs ends at; when not set --min-lr"
    )
    lr_decay_style: DecayStyle = flag(DecayStyle.LINEAR, help="shape after warm-up")
    lr_decay_iters: int | None = flag(
        None, help="iterations over which it decays; when not set, the whole training"
    )
    lr_decay_samples: int | None = flag(
        None, help="samples over which it decays; when not set, the whole training"
    )
    lr_decay_tokens: int | None = flag(
        None, help="tokens at which its decay ends, which begins where warm-up in any unit ends"
    )
    lr_warmup_iters: int = flag(0, help="iterations of linear warm-up")
    lr_warmup_samples: int = flag(0, help="samples of linear warm-up")
    lr_warmup_tokens: int = flag(0, help="tokens of linear warm-up, with --lr-decay-tokens")
    lr_warmup_fraction: float | None = flag(
        None, help="share of the decay length that is warm-up, 0 to 1"
    )
    lr_warmup_init: float = flag(0.0, help="learning rate that warm-up starts from")
    lr_wsd_decay_style: WsdDecayStyle = flag(
        WsdDecayStyle.EXPONENTIAL, help="shape of the last part of WSD"
    )
    lr_wsd_decay_iters: int | None = flag(None, help="iterations of the last part of WSD")
    lr_wsd_decay_samples: int | None = flag(None, help="samples of the last part of WSD")
    start_weight_decay: float | None = flag(
        None, help="weight decay at the start, with a --weight-decay-incr-style"
    )
    end_weight_decay: float | None = flag(
        None, help="weight decay at the end, with a --weight-decay-incr-style"
    )
    weight_decay_incr_style: WeightDecayStyle = flag(
        WeightDecayStyle.CONSTANT, help="how weight decay goes from start to end"
    )

    def __post_init__(self) -> None:
        raise_all(self._problems())

    def _problems(self) -> Iterator[ConfigError]:
        yield from check_field(
            0 < self.lr < math.inf,
            "lr",
            self.lr,
            problem="the learning rate is not a positive number",
            fix="try 3e-4",
        )
        for name in ("min_lr", "lr_warmup_init"):
            value = getattr(self, name)
            yield from check_field(
                0 <= value <= max(self.lr, 0),
                name,
                value,
                problem="it is not between 0 and the peak learning rate",
                fix=f"use a number from 0 to {self.lr}",
            )
        for name in ("lr_warmup_iters", "lr_warmup_samples", "lr_warmup_tokens"):
            value = getattr(self, name)
            yield from check_field(
                value >= 0, name, value, problem="it cannot be negative", fix="use 0 or more"
            )
        if self.lr_warmup_fraction is not None:
            yield from check_field(
                0 <= self.lr_warmup_fraction <= 1,
                "lr_warmup_fraction",
                self.lr_warmup_fraction,
                problem="the warm-up share is outside [0, 1]",
                fix="use a share such as 0.01",
            )
        yield from self._decoupled_problems()
        yield from self._length_problems()
        yield from self._weight_decay_problems()

    @property
    def is_decoupled(self) -> bool:
        """Whether the tables of words have a learning rate of their own."""
        return self.decoupled_lr is not None

    @property
    def decoupled(self) -> "ScheduleConfig":
        """The schedule of the tables of words: the same lengths and shape between other rates."""
        floor = self.min_lr if self.decoupled_min_lr is None else self.decoupled_min_lr
        peak = self.lr if self.decoupled_lr is None else self.decoupled_lr
        return replace(self, lr=peak, min_lr=floor, decoupled_lr=None, decoupled_min_lr=None)

    def _decoupled_problems(self) -> Iterator[ConfigError]:
        if self.decoupled_lr is None:
            if self.decoupled_min_lr is not None:
                yield ConfigError(
                    "the end of a learning rate was given, and its peak was not",
                    found=f"--decoupled-min-lr {self.decoupled_min_lr} without --decoupled-lr",
                    fix="add --decoupled-lr, or leave --decoupled-min-lr out",
                )
            return
        yield from check_field(
            0 < self.decoupled_lr < math.inf,
            "decoupled_lr",
            self.decoupled_lr,
            problem="the learning rate is not a positive number",
            fix=f"try {self.lr}, the --lr of all other weights",
        )
        ends = {"--lr-warmup-init": self.lr_warmup_init}
        if self.decoupled_min_lr is None:
            ends["--min-lr"] = self.min_lr
        else:
            ends["--decoupled-min-lr"] = self.decoupled_min_lr
        for name, value in ends.items():
            if not 0 <= value <= max(self.decoupled_lr, 0):
                yield ConfigError(
                    "the learning rate of the word tables does not lie above where it starts "
                    "and ends",
                    found=f"--decoupled-lr {self.decoupled_lr} with {name} {value}",
                    fix=f"use --decoupled-lr {value} or more, or --decoupled-min-lr 0"
                    if name != "--lr-warmup-init"
                    else f"use --decoupled-lr {value} or more",
                )

    def _length_problems(self) -> Iterator[ConfigError]:
        warmups = [
            f"--{name.replace('_', '-')} {getattr(self, name)}"
            for name in (
                "lr_warmup_iters",
                "lr_warmup_samples",
                "lr_warmup_tokens",
                "lr_warmup_fraction",
            )
            if getattr(self, name)
        ]
        if len(warmups) > 1:
            yield ConfigError(
                "warm-up was given in more than one unit",
                found=", ".join(warmups),
                fix=f"keep one, for example {warmups[0]}",
            )
        decays = [
            f"--{name.replace('_', '-')} {getattr(self, name)}"
            for name in ("lr_decay_iters", "lr_decay_samples", "lr_decay_tokens")
            if getattr(self, name) is not None
        ]
        if len(decays) > 1:
            yield ConfigError(
                "the decay length was given in two units",
                found=", ".join(decays),
                fix="keep the one that fits --train-iters or --train-samples",
            )
        yield from self._token_problems()
        for name in (
            "lr_decay_iters",
            "lr_decay_samples",
            "lr_decay_tokens",
            "lr_wsd_decay_iters",
            "lr_wsd_decay_samples",
        ):
            value = getattr(self, name)
            if value is not None:
                yield from check_field(
                    value > 0, name, value, problem="it is not positive", fix="use 1 or more"
                )
        wsd_length = (self.lr_wsd_decay_iters, self.lr_wsd_decay_samples)
        if self.lr_decay_style is DecayStyle.WSD and wsd_length == (None, None):
            yield ConfigError(
                "a WSD schedule needs the length of its decay",
                found="--lr-decay-style WSD without a decay length",
                fix="add --lr-wsd-decay-iters (a tenth of the training is usual)",
            )

    def _token_problems(self) -> Iterator[ConfigError]:
        """Yield an error if only the warm-up is in tokens, or the decay of a WSD schedule."""
        in_tokens = self.lr_decay_tokens is not None
        if self.lr_warmup_tokens and not in_tokens:
            yield ConfigError(
                "warm-up is in tokens, and the decay of the learning rate is not",
                found=f"--lr-warmup-tokens {self.lr_warmup_tokens} without --lr-decay-tokens",
                fix="add --lr-decay-tokens, or use --lr-warmup-samples",
            )
        if in_tokens and self.lr_decay_style is DecayStyle.WSD:
            yield ConfigError(
                "a WSD schedule is in iterations or samples",
                found=f"--lr-decay-style WSD, --lr-decay-tokens {self.lr_decay_tokens}",
                fix="use --lr-decay-iters or --lr-decay-samples",
            )

    def _weight_decay_problems(self) -> Iterator[ConfigError]:
        ends = (self.start_weight_decay, self.end_weight_decay)
        moving = self.weight_decay_incr_style is not WeightDecayStyle.CONSTANT
        if moving and None in ends:
            yield ConfigError(
                "a moving weight decay needs both of its ends",
                found=f"--weight-decay-incr-style {self.weight_decay_incr_style}",
                fix="give --start-weight-decay and --end-weight-decay",
            )
        if not moving and ends != (None, None):
            yield ConfigError(
                "the ends of a moving weight decay were given, but it is constant",
                found=f"--start-weight-decay {ends[0]}, --end-weight-decay {ends[1]}",
                fix="add --weight-decay-incr-style linear, or use --weight-decay",
            )


def warmup_samples(schedule: ScheduleConfig, global_batch_size: int) -> int:
    """Return the length of a warm-up in samples or iterations; 0 where it has another unit."""
    return schedule.lr_warmup_samples or schedule.lr_warmup_iters * global_batch_size
