"""One process: initialised once, undone by a failure, and made anew after a shutdown."""

import inspect
import os
import random
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron import initialize as initialize_module
from megatron import program
from megatron.errors import ConfigError, MachineError, NotInitialisedError, PreflightError
from megatron.global_vars import get_runtime
from megatron.initialize import (
    initialize_megatron,
    is_initialised,
    shutdown_megatron,
    tokenizer_of,
)
from megatron.launch import Launch
from megatron.mpu.initialize import model_parallel_is_initialized
from megatron.ops import cpu_products
from megatron.ops.cpu_memory import tensor_memory
from tests.support.tiny import tiny_run, write_tiny_corpus


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    """Generators and groups are as before when a test ends."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield
    shutdown_megatron()
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])


@pytest.fixture
def corpus(tmp_path: Path) -> str:
    return write_tiny_corpus(tmp_path)


def states() -> tuple[bool, bool, bool]:
    """Whether there is a runtime, a process group, and a parallel context."""
    return is_initialised(), dist.is_initialized(), model_parallel_is_initialized()


def test_a_second_call_names_the_first(corpus: str) -> None:
    config = tiny_run(corpus)
    line = inspect.currentframe().f_lineno + 1  # type: ignore[union-attr]
    runtime = initialize_megatron(config)
    assert is_initialised()
    assert get_runtime() is runtime
    with pytest.raises(NotInitialisedError, match="called twice") as caught:
        initialize_megatron(config)
    assert f"first at {__file__}:{line}, again at {__file__}:" in str(caught.value)
    assert get_runtime() is runtime, "the first one is not disturbed"


def test_a_shutdown_allows_another_start(corpus: str) -> None:
    first = initialize_megatron(tiny_run(corpus)).context
    shutdown_megatron()
    assert not any(states())
    assert not program._ON_FAILURE
    shutdown_megatron()  # and once more does nothing
    second = initialize_megatron(tiny_run(corpus)).context
    assert first is not second
    assert second.world.size == 1
    assert second.tp.handle is not None, "groups of one are groups"


def test_deterministic_mode_lasts_until_the_shutdown(
    corpus: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fixed: list[bool] = []
    monkeypatch.setattr(initialize_module, "fix_algorithms", lambda: fixed.append(True))
    for asked in (False, True):
        initialize_megatron(tiny_run(corpus, deterministic_mode=asked))
        assert torch.are_deterministic_algorithms_enabled() == asked
        assert torch.utils.deterministic.fill_uninitialized_memory != asked
        shutdown_megatron()
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.utils.deterministic.fill_uninitialized_memory
    assert fixed == [True]


def test_partial_sums_are_those_of_the_flag_until_the_shutdown(corpus: str) -> None:
    products = torch.backends.cuda.matmul
    for allowed in (False, True):
        initialize_megatron(tiny_run(corpus, bf16_reduced_precision_matmul=allowed))
        assert products.allow_bf16_reduced_precision_reduction == allowed
        shutdown_megatron()
        assert products.allow_bf16_reduced_precision_reduction


def test_a_run_on_a_cpu_takes_the_faster_library_until_the_shutdown(
    corpus: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_products, "onednn_is_faster_in_fp32", lambda *_: True)
    monkeypatch.setattr(cpu_products, "fp32_products_are_exact", lambda: True)
    for length, library in (64, cpu_products.ONEDNN), (63, cpu_products.MKL):
        # Heads of 64 channels: s h d is 2^20 with 64 tokens.
        initialize_megatron(tiny_run(corpus, seq_length=length, hidden_size=256))
        assert cpu_products.fp32_library() == library
        shutdown_megatron()
        assert cpu_products.fp32_library() == cpu_products.MKL


def test_a_run_on_a_cpu_keeps_freed_memory(corpus: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr("megatron.initialize.host.keep_freed_memory", lambda: asked.append("kept"))
    initialize_megatron(tiny_run(corpus))
    assert asked == ["kept"]


def test_a_run_on_a_cpu_keeps_tensors_together_until_the_shutdown(corpus: str) -> None:
    initialize_megatron(tiny_run(corpus))
    before = tensor_memory().in_use
    during = torch.empty(1 << 20, dtype=torch.uint8)
    assert tensor_memory().in_use == before + during.nbytes
    shutdown_megatron()
    after = torch.empty(1 << 20, dtype=torch.uint8)
    assert tensor_memory().in_use == before + during.nbytes
    del during, after
    assert tensor_memory().in_use == before


def test_a_process_group_of_the_caller_is_used_and_left(corpus: str) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        runtime = initialize_megatron(tiny_run(corpus))
        assert runtime.context.world.handle is dist.group.WORLD
        assert runtime.launch == Launch(0, 1, 0, 1)
        shutdown_megatron()
        assert states() == (False, True, False)
        initialize_megatron(tiny_run(corpus))
        shutdown_megatron()
    finally:
        dist.destroy_process_group()


def test_a_launcher_and_a_process_group_that_disagree_are_refused(
    corpus: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = Launch(1, 2, 1, 2, has_rendezvous=True)
    monkeypatch.setattr(initialize_module, "launch_from_environment", lambda: told)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(ConfigError, match="the process group that is there already disagree"):
            initialize_megatron(tiny_run(corpus))
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_kernels_without_an_order_are_warned_of_on_a_gpu(
    kind: str, corpus: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(initialize_module, "order_kernels", lambda size: "8" * size)
    # The device stays the CPU; what else asks for its name is the choice of a backend.
    shown = SimpleNamespace(type=kind)
    monkeypatch.setattr(initialize_module.device, "current", lambda: shown)
    monkeypatch.setattr(initialize_module, "probe_machine", lambda dtypes, world: None)
    initialize_megatron(tiny_run(corpus, distributed_backend="gloo"))
    warned = "CUDA_DEVICE_MAX_CONNECTIONS is 8, and tensor parallelism" in capsys.readouterr().err
    assert warned == (kind == "cuda")


def test_ranks_that_share_cores_are_told_how_many(
    corpus: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = torch.get_num_threads()
    monkeypatch.setattr(initialize_module, "fair_threads", lambda launch: 3)
    try:
        for asked, threads in ((None, 3), (2, 2)):
            initialize_megatron(tiny_run(corpus, num_threads=asked, log_level="info"))
            assert torch.get_num_threads() == threads
            is_announced = (
                "3 CPU threads for each of the 1 ranks of this node" in capsys.readouterr().out
            )
            assert is_announced == (asked is None)
            shutdown_megatron()
    finally:
        torch.set_num_threads(before)


def test_what_preflight_finds_leaves_nothing_behind(tmp_path: Path) -> None:
    bad = tiny_run(str(tmp_path / "none"), load=str(tmp_path / "none"))
    with pytest.raises(PreflightError, match="2 checks failed"):
        initialize_megatron(bad)
    assert not any(states())


def test_a_failure_after_the_groups_are_made_takes_them_back(
    corpus: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def disagree(facts: object, world: object) -> None:
        assert dist.is_initialized()
        assert model_parallel_is_initialized()
        raise ConfigError("the ranks do not run the same thing", fix="start again")

    with monkeypatch.context() as patch:
        patch.setattr(initialize_module, "agree_on_launch", disagree)
        with pytest.raises(ConfigError, match="do not run the same thing"):
            initialize_megatron(tiny_run(corpus))
    assert not any(states())
    initialize_megatron(tiny_run(corpus))  # a retry starts clean


def test_ranks_that_cannot_meet_are_a_machine_error(
    corpus: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*args: object, **kwargs: object) -> None:
        raise RuntimeError("connection refused")

    monkeypatch.setattr(dist, "init_process_group", refused)
    with pytest.raises(MachineError, match="could not find each other") as caught:
        initialize_megatron(tiny_run(corpus))
    assert "1 ranks over gloo: connection refused" in str(caught.value)
    assert not is_initialised()


def test_a_tokenizer_that_cannot_be_built_is_reported_with_the_rest(tmp_path: Path) -> None:
    bad = tiny_run(str(tmp_path / "none"), tokenizer_type="GPT2BPETokenizer", vocab_size=None)
    with pytest.raises(PreflightError) as caught:
        initialize_megatron(bad)
    checks = [finding.check for finding in caught.value.findings]
    assert checks == ["tokenizer_can_be_built", "corpora_open_and_are_whole"]


def test_every_generator_follows_the_seed(corpus: str) -> None:
    def draws() -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    def first_draws(seed: int) -> tuple[float, float, float]:
        initialize_megatron(tiny_run(corpus, seed=seed))
        drawn = draws()
        shutdown_megatron()
        return drawn

    one, again, other = first_draws(1), first_draws(1), first_draws(2)
    assert one == again
    assert not set(one) & set(other)


def test_the_tokenizer_is_the_one_of_the_flags(corpus: str) -> None:
    assert tokenizer_of(tiny_run(corpus)).vocab_size == 51
    byte = tiny_run(corpus, tokenizer_type="ByteTokenizer", vocab_size=None)
    assert tokenizer_of(byte).vocab_size == 257


def test_a_forked_child_has_not_initialised_anything(corpus: str) -> None:
    initialize_megatron(tiny_run(corpus))
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writer, b"yes" if is_initialised() else b"no")
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reader, 3) == b"no"
    os.close(reader)
    os.close(writer)
