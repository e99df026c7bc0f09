"""Whole runs on CUDA: groups over NCCL, checkpoints and resuming, text from a checkpoint."""

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron import device
from megatron.arguments import parse_args
from megatron.config.run import RunConfig
from megatron.data.indexed_dataset import MMapIndexedDatasetBuilder
from megatron.inference.generate import generate
from megatron.inference.sampling_params import SamplingParams
from megatron.initialize import initialize_megatron, shutdown_megatron
from megatron.mpu.collectives import all_reduce
from megatron.preflight.checks import MODEL_CHECKS
from megatron.trained_model import load_model_for_inference
from megatron.training import pretrain
from pretrain_gpt import gpt_task
from tests.gpu.steps import SMALL_GPT, VOCABULARY

pytestmark = pytest.mark.gpu

ITERATIONS = 6


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Documents that count upwards, so that there is something to learn."""
    prefix = tmp_path_factory.mktemp("corpus") / "counting_text_document"
    random = np.random.RandomState(0)
    with MMapIndexedDatasetBuilder(prefix, np.uint16) as builder:
        for _ in range(200):
            start, length = random.randint(VOCABULARY - 1), random.randint(50, 300)
            counting = (start + np.arange(length)) % (VOCABULARY - 1)
            builder.add_document(np.append(counting, VOCABULARY - 1))
    return str(prefix)


def run_of(corpus: str, *flags: str) -> RunConfig:
    """A run of a few iterations in bf16, with dropout, on the GPU."""
    return parse_args(
        [
            *SMALL_GPT,
            *("--device", "cuda", "--bf16", "--global-batch-size", "8", "--num-workers", "0"),
            *("--tokenizer-type", "NullTokenizer", "--vocab-size", str(VOCABULARY - 1)),
            *("--data-path", corpus, "--split", "98,2,0", "--eval-iters", "0"),
            *("--train-iters", str(ITERATIONS), "--lr-warmup-iters", "2"),
            *("--lr-decay-style", "cosine"),
            *flags,
        ]
    )


def final_state(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor that the last checkpoint of a run holds: weights, masters and moments."""
    from safetensors.torch import load_file

    checkpoint = next(folder.glob(f"*{ITERATIONS:07d}"))
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(checkpoint.rglob("*.safetensors")):
        if "rng" not in path.name and "generator" not in path.name:
            tensors |= {f"{path.name}:{name}": value for name, value in load_file(path).items()}
    return tensors


def test_initialize_megatron_makes_groups_that_talk_over_nccl() -> None:
    runtime = initialize_megatron(run_of("no-corpus"), checks=MODEL_CHECKS)
    try:
        assert dist.get_backend() == "nccl"
        assert device.current().type == "cuda"
        for name in ("world", "tp", "pp", "dp", "model", "embedding"):
            group = getattr(runtime.context, name)
            assert group.handle is not None
            tensor = torch.full((3,), 2.5, device=device.current())
            # Not through our own collectives, which return at once in a group of one.
            dist.all_reduce(tensor, group=group.handle)
            assert tensor.tolist() == [2.5, 2.5, 2.5]
            assert all_reduce(tensor, group) is tensor
    finally:
        shutdown_megatron()
    assert not dist.is_initialized()


@pytest.mark.usefixtures("deterministic")
def test_a_resumed_run_ends_on_the_same_bits_as_one_that_never_stopped(
    corpus: str, tmp_path: Path
) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    pretrain(gpt_task(), run_of(corpus, "--save", str(whole)))
    there = ("--save", str(parts), "--load", str(parts))
    stopped = pretrain(gpt_task(), run_of(corpus, *there, "--exit-interval", "3"))
    assert stopped.iteration == 3
    resumed = pretrain(gpt_task(), run_of(corpus, *there))
    assert resumed.iteration == ITERATIONS
    expected, found = final_state(whole), final_state(parts)
    assert expected.keys() == found.keys()
    assert len(expected) > 50, "weights, masters and two moments of some 28 parameters"
    differing = [name for name, value in expected.items() if not torch.equal(found[name], value)]
    assert differing == []


def test_a_checkpoint_made_on_the_gpu_writes_the_same_text_on_both_devices(
    corpus: str, tmp_path: Path
) -> None:
    # In fp32: bf16 on a CPU rounds otherwise, and one other token changes all that follow.
    config = run_of(corpus, "--save", str(tmp_path), "--hidden-dropout", "0")
    plain = config.to_plain()
    plain["precision"]["bf16"] = False
    pretrain(gpt_task(), RunConfig.from_plain(plain))
    written = []
    for kind in ("cuda", "cpu"):
        loaded = load_model_for_inference(tmp_path, device=kind)
        try:
            assert next(loaded.model.parameters()).device.type == kind
            generations = generate(
                loaded.model,
                [[5, 6, 7], [100, 101, 102, 103, 104]],
                max_new_tokens=20,
                params=SamplingParams(greedy=True),
                eod=None,
                seed=1,
                ctx=loaded.ctx,
            )
            written.append([generation.tokens for generation in generations])
        finally:
            shutdown_megatron()
    assert written[0] == written[1]
    assert [len(tokens) for tokens in written[0]] == [20, 20]


def test_sampling_in_bf16_draws_from_the_vocabulary_and_repeats_with_its_seed(
    corpus: str, tmp_path: Path
) -> None:
    pretrain(gpt_task(), run_of(corpus, "--save", str(tmp_path)))
    loaded = load_model_for_inference(tmp_path, device="cuda")
    try:
        drawn = [
            generate(
                loaded.model,
                [[5, 6, 7]] * 4,
                max_new_tokens=16,
                params=SamplingParams(temperature=1.0, top_k=50),
                eod=None,
                seed=seed,
                ctx=loaded.ctx,
            )
            for seed in (1, 1, 2)
        ]
    finally:
        shutdown_megatron()
    tokens = [[generation.tokens for generation in several] for several in drawn]
    assert tokens[0] == tokens[1] != tokens[2]
    assert all(0 <= token < VOCABULARY for row in tokens[0] for token in row)
