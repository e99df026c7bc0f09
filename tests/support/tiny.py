"""Runs small enough for a test, through the real programs' code: corpus, flags, training, result.

A run is described by flags under their config names (`tiny_run(corpus, lr=0.1)`) and trained by
`train`, which calls `pretrain` and writes down what passed between the loop and the engine. Every
tolerance of the laws stands here, with its reason.
"""

import dataclasses
import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

import megatron.initialize
import megatron.training
from finetune_t0_non_causal_decoder import t0_task
from megatron.checkpoint import rng
from megatron.config.fields import field_names
from megatron.config.run import GROUPS, RunConfig
from megatron.data.indexed_dataset import MMapIndexedDatasetBuilder
from megatron.engine.base import (
    Engine,
    EvaluationSum,
    PendingReport,
    PretrainTask,
    RawBatch,
    StepPlan,
    StepReport,
)
from megatron.global_vars import Runtime
from megatron.preflight.source import source_digests
from megatron.progress import Progress
from megatron.training import pretrain
from pretrain_gpt import gpt_task
from pretrain_prefix_lm import prefix_lm_task
from pretrain_vit import run_of_images, vit_task

# Relative difference of float64 numbers that are equal in mathematics. A few steps of a tiny model
# leave 1e-14 or so of rounding; an error in a formula, a mask or a scale leaves 1e-3 and more.
FP64 = 1e-9
# The same in float32: an epsilon of 6e-8, times the sums of a few hundred terms that another order
# rounds otherwise, times what a few steps of AdamW (which divides by the size of the gradient) add.
FP32 = 1e-4
# In bfloat16 a single number is off by 2^-9 = 2e-3; sums are in fp32, so a mean over tokens is off
# by less than a few such steps, and weights of another rounding follow another path.
BF16 = 2e-2

VOCABULARY = 50  # with its end-of-document token 51: no multiple of anything that pads it
TOKENS_PER_SAMPLE = 16
EOD = VOCABULARY


def write_tiny_corpus(folder: Path, *, documents: int = 160, seed: int = 0) -> str:
    """Documents of 2 to 30 tokens that each end with an end of document; returns the prefix.

    A token is likely to be followed by its successor, so that there is something to learn.
    """
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.RandomState(seed)
    prefix = folder / "tiny_text_document"
    with MMapIndexedDatasetBuilder(prefix, np.uint16) as builder:
        for _ in range(documents):
            steps = np.where(random.rand(random.randint(1, 30)) < 0.7, 1, random.randint(50))
            tokens = (random.randint(VOCABULARY) + np.cumsum(steps)) % VOCABULARY
            builder.add_document(np.append(tokens, EOD))
    return str(prefix)


def tiny_run(corpus: str, **flags: Any) -> RunConfig:
    """A run of 3 iterations of 8 samples on two layers in float64, with clipping, on the CPU."""
    values: dict[str, Any] = {
        "num_layers": 2,
        "hidden_size": 16,
        "num_attention_heads": 4,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "init_method_std": 0.2,
        "seq_length": TOKENS_PER_SAMPLE,
        "data_path": (corpus,),
        "split": "80,10,10",
        "num_workers": 0,
        "tokenizer_type": "NullTokenizer",
        "vocab_size": VOCABULARY,
        "make_vocab_size_divisible_by": 4,
        "micro_batch_size": 1,
        "global_batch_size": 8,
        "train_iters": None if "train_samples" in flags else 3,
        "eval_iters": 0,
        "exit_signal_handler": False,
        "lr": 0.01,
        "clip_grad": 0.5,
        "fp64": not (flags.get("bf16") or flags.get("fp16")),
        "log_interval": 100,  # so that reports are read when the next step runs
        "log_level": "warning",
        "device": "cpu",
        "distributed_timeout_minutes": 1.0,
    }
    values |= flags
    groups: dict[str, Any] = {}
    for name, group in GROUPS.items():
        groups[name] = {key: values.pop(key) for key in field_names(group) if key in values}
    assert not values, f"no such flags: {sorted(values)}"
    plain = {name: _listed(group) for name, group in groups.items()}
    return RunConfig.from_plain(plain)


# Every kind of position, norm, activation, bias, tying and mask, in as few models as hold them.
MODELS: Mapping[str, Mapping[str, Any]] = {
    "gpt2": {},
    "llama": {
        "position_embedding_type": "rope",
        "normalization": "RMSNorm",
        "swiglu": True,
        "ffn_hidden_size": 24,
        "num_attention_heads": 8,
        "num_query_groups": 4,
        "untie_embeddings_and_output_weights": True,
        "add_bias_linear": False,
    },
    "bloom": {"position_embedding_type": "alibi", "embed_layernorm": True},
    # What the families after LLaMA added, all in one; norms after branches, as in OLMo 2.
    "neox, qwen, mistral": {
        "norm_placement": "after",
        "logit_divisor": 0.7,
        "position_embedding_type": "rope",
        "rotary_percent": 0.5,
        "kv_channels": 8,
        "use_rope_scaling": True,
        "rope_scaling_original_length": 12,
        "use_parallel_residual": True,
        "qk_layernorm": True,
        "sliding_window": 6,
        "window_attn_skip_freq": "2",
        "softmax_type": "learnable",
        "num_attention_heads": 8,
        "num_query_groups": 4,
        "add_bias_linear": False,
        "add_qkv_bias": True,
    },
    "mixtral": {  # with YaRN, Gemma's norms and Granite's factors
        "position_embedding_type": "rope",
        "rope_type": "yarn",
        "rotary_scaling_factor": 4.0,
        "yarn_original_max_position_embeddings": 8,
        "yarn_beta_fast": 2.0,
        "yarn_beta_slow": 0.2,
        "no_rope_freq": "2",
        "norm_placement": "both",
        "qk_layernorm": True,
        "qk_layernorm_scope": "all-heads",
        "embedding_multiplier": 1.5,
        "residual_multiplier": 0.7,
        "softmax_scale": 0.9,
        "logit_divisor": 1.3,
        "normalization": "RMSNorm",
        "swiglu": True,
        "moe_ffn_hidden_size": 12,
        "num_experts": 4,
        "moe_router_add_bias": True,
        "num_attention_heads": 8,
        "num_query_groups": 4,
        "untie_embeddings_and_output_weights": True,
        "add_bias_linear": False,
    },
    "ragged": {
        "reset_position_ids": True,
        "reset_attention_mask": True,
        "eod_mask_loss": True,
    },
}


class Part(NamedTuple):
    """What one rank holds of one whole tensor: pairs of a box (as slices) and its values."""

    shape: tuple[int, ...]
    pieces: list[tuple[tuple[slice, ...], Tensor]]


@dataclasses.dataclass
class Record:
    """What a run did on one rank; numbers are Python's, tensors are copies."""

    steps: list[StepReport] = dataclasses.field(default_factory=list)
    plans: list[StepPlan] = dataclasses.field(default_factory=list)
    evaluations: list[EvaluationSum] = dataclasses.field(default_factory=list)
    trained_on: list[list[list[float]]] = dataclasses.field(default_factory=list)  # micro-batches
    evaluated_on: list[list[list[float]]] = dataclasses.field(default_factory=list)
    progress: Progress = dataclasses.field(default_factory=Progress)
    state: dict[str, Part] = dataclasses.field(default_factory=dict)
    scalars: dict[str, Any] = dataclasses.field(default_factory=dict)
    generators: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def losses(self) -> list[float]:
        """Mean loss of every iteration."""
        return [step.loss for step in self.steps]

    @property
    def grad_norms(self) -> list[float]:
        """Gradient norm before clipping of every iteration."""
        return [step.grad_norm for step in self.steps]


class RecordingEngine:
    """Stands between the loop and an engine, and writes down what passes."""

    def __init__(self, engine: Engine, record: Record) -> None:
        self.engine, self.record = engine, record

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def start_step(
        self, batches: Iterator[RawBatch], plan: StepPlan, signals: Sequence[bool] = ()
    ) -> PendingReport:
        seen = _remembered(batches, self.record.trained_on)
        # What a program's own code may do: so the states that are saved are others in every step,
        # and on every rank.
        torch.rand(1 + dist.get_rank())
        np.random.rand(1 + dist.get_rank())
        random.random()
        pending = self.engine.start_step(seen, plan, signals)
        self.record.plans.append(plan)

        def read() -> StepReport:
            self.record.steps.append(pending())
            return self.record.steps[-1]

        return read

    def evaluate(self, batches: Iterator[RawBatch], num_microbatches: int) -> EvaluationSum:
        seen = _remembered(batches, self.record.evaluated_on)
        result = self.engine.evaluate(seen, num_microbatches)
        self.record.evaluations.append(result)
        return result


def train(config: RunConfig, task: PretrainTask | None = None) -> Record:
    """Run `pretrain` in this process, a rank of `run_on_ranks`, and return its record.

    Changes modules of this process: call it only where the process ends with the test.
    """
    record = Record()
    build_engine, run = REAL_BUILD_ENGINE, REAL_RUN

    def recording(*args: Any) -> RecordingEngine:
        engines.append(RecordingEngine(build_engine(*args), record))
        return engines[-1]

    def run_and_look(task: PretrainTask, runtime: Runtime) -> Progress:
        progress = run(task, runtime)
        state = engines[-1].engine.state(optimizer=True)
        record.state = {
            tensor.name: Part(
                tensor.global_shape,
                [(part.box.slices, part.view.clone()) for part in tensor.parts],
            )
            for tensor in state.tensors
        }
        record.scalars = dict(state.scalars)
        states = rng.capture()
        record.generators = {**states.tensors, **states.values}
        return progress

    engines: list[RecordingEngine] = []
    megatron.training.build_engine = recording  # type: ignore[assignment, attr-defined]
    megatron.training.run = run_and_look
    megatron.initialize.source_digests = DIGESTS.copy  # type: ignore[attr-defined]
    record.progress = pretrain(task or gpt_task(), config)
    return record


REAL_BUILD_ENGINE = megatron.training.build_engine  # type: ignore[attr-defined]
REAL_RUN = megatron.training.run
# Reading the whole package takes a tenth of a tiny run; the server that forks ranks has done it.
DIGESTS = source_digests()


def train_all(configs: Sequence[RunConfig]) -> list[Record]:
    """A body for `run_on_ranks`: several runs one after the other in the same processes."""
    assert dist.is_initialized()
    return [train(config) for config in configs]


def train_prefix_all(configs: Sequence[RunConfig]) -> list[Record]:
    """`train_all` of prefix LMs; rows of pairs by the program that reads nothing else."""
    return [train(each, t0_task() if each.data.mtf else prefix_lm_task()) for each in configs]


def train_vit_all(configs: Sequence[RunConfig]) -> list[Record]:
    """`train_all` of ViTs."""
    return [train(each, vit_task(each.vision)) for each in map(run_of_images, configs)]


def assert_same_bits(found: Record, expected: Record) -> None:
    """Check losses, gradient norms, all tensors and all generators of two runs on one rank."""
    assert (found.losses, found.grad_norms) == (expected.losses, expected.grad_norms)
    assert found.state.keys() == expected.state.keys()
    for name, part in found.state.items():
        for (_, values), (_, others) in zip(part.pieces, expected.state[name].pieces, strict=True):
            assert torch.equal(values, others), name
    for name, state in expected.generators.items():
        same = found.generators[name] == state
        assert torch.as_tensor(same).all(), name


def whole(records: Sequence[Record], *, prefix: str = "") -> dict[str, Tensor]:
    """The whole tensors of a run from what all of its ranks hold; replicas must be equal bits."""
    result: dict[str, Tensor] = {}
    for record in records:
        for name, part in record.state.items():
            if not name.startswith(prefix) or not part.pieces:
                continue  # of a sharded state a rank may hold nothing but padding
            dtype = part.pieces[0][1].dtype
            tensor = result.setdefault(name, torch.full(part.shape, float("nan"), dtype=dtype))
            for box, values in part.pieces:
                known = tensor[box]
                fresh = known.isnan()
                assert torch.equal(known[~fresh], values[~fresh]), f"replicas differ in {name}"
                known.copy_(values)
    for name, tensor in result.items():
        assert not tensor.isnan().any(), f"no rank holds all of {name}"
    return result


def assert_went_on(resumed: Sequence[Record], straight: Sequence[Record], *, last: int) -> None:
    """A run did the `last` steps of one that nothing stopped, and ended as that did, to the bit."""
    for rank, (one, other) in enumerate(zip(resumed, straight, strict=True)):
        assert repr(one.steps) == repr(other.steps[len(other.steps) - last :]), f"steps of {rank}"
        assert one.progress == other.progress, f"progress of {rank}"
        assert one.scalars == other.scalars, f"numbers of {rank}"
    found, expected = whole(resumed), whole(straight)
    assert found.keys() == expected.keys()
    differing = [name for name in expected if not torch.equal(found[name], expected[name])]
    assert not differing, f"{differing} differ"


def assert_close(found: Sequence[float], expected: Sequence[float], tolerance: float) -> None:
    """Equal numbers up to a relative difference, one by one."""
    assert len(found) == len(expected) > 0
    for at, (one, other) in enumerate(zip(found, expected)):
        difference = abs(one - other) / max(abs(other), 1e-30)
        assert difference <= tolerance, f"step {at}: {one} and {other}, {difference:.1e} apart"


def assert_all_close(
    found: Mapping[str, Tensor], expected: Mapping[str, Tensor], tolerance: float
) -> None:
    """The same tensors, up to a difference relative to the largest value of each."""
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        size = max(float(expected[name].abs().max()), 1e-3)
        difference = float((tensor - expected[name]).abs().max()) / size
        assert difference <= tolerance, f"{name}: {difference:.1e} of its largest value apart"


def _remembered(batches: Iterator[RawBatch], into: list[list[list[float]]]) -> Iterator[RawBatch]:
    for batch in batches:
        if "image" in batch:
            into.append(batch["image"].flatten(1).tolist())
            yield batch
            continue
        # Of span corruption and of a T5 there is no text, but parts of it.
        parts = [part for part in batch.values() if part.dim() == 2]
        tokens = batch["text"] if "text" in batch else torch.cat(parts, dim=1)
        into.append(tokens.tolist())
        yield batch


def _listed(group: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: list(value) if isinstance(value, tuple) else value for name, value in group.items()
    }
