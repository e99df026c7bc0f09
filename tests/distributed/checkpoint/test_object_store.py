"""Checkpoints of several ranks in a real S3-compatible server: saved, killed, gone on with."""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from megatron import log
from megatron.checkpoint.files import store
from megatron.checkpoint.files.store import place
from megatron.checkpoint.folder import manifest
from megatron.checkpoint.folder import run_folder as folders
from megatron.config.run import RunConfig
from megatron.errors import CheckpointError
from megatron.trained_model import load_model_for_inference
from tests.support.checkpoints.object_store import SECRET, ObjectStore, object_store
from tests.support.checkpoints.save_faults import kill_this_process
from tests.support.ranks import run_on_ranks
from tests.support.tiny import Record, tiny_run, train, whole, write_tiny_corpus

STEPS, RANKS = 4, 2


@pytest.fixture(scope="module")
def server() -> Iterator[ObjectStore]:
    with object_store() as started:
        yield started


def train_in(
    environment: dict[str, str], config: RunConfig, fault: str | None = None
) -> tuple[Record | str, str]:
    """Train one rank, return its output too; processes keep the first test's environment."""
    output: list[str] = []
    with patch.object(log, "_write", lambda message, stream: output.append(message)):
        return _train_in(environment, config, fault), "\n".join(output)


def _train_in(environment: dict[str, str], config: RunConfig, fault: str | None) -> Record | str:
    os.environ.update(environment)
    real = store._Upload.finish

    def finish(upload) -> None:
        rank = torch.distributed.get_rank()
        if fault == "kill" and rank == 1 and "iter_0000004/shard" in str(upload._path):
            kill_this_process()
        real(upload)

    store._Upload.finish = finish
    try:
        return train(config)
    except CheckpointError as error:
        return str(error)
    finally:
        store._Upload.finish = real


@pytest.mark.parametrize(
    "async_save",
    [pytest.param(False, marks=pytest.mark.wide, id="waits"), pytest.param(True, id="beside")],
)
def test_a_run_saves_to_a_bucket_and_goes_on_from_it(
    server: ObjectStore, tmp_path: Path, async_save: bool
) -> None:
    folder = "team/beside" if async_save else "team/waits"
    address = f"{server.address}/{folder}"
    flags = {
        "tensor_model_parallel_size": 2,
        "train_iters": STEPS,
        "micro_batch_size": 4,
        "hidden_dropout": 0.1,
    }
    corpus = write_tiny_corpus(tmp_path)
    saving = {"save": address, "load": address, "save_interval": 2, "async_save": async_save}
    plain = tiny_run(corpus, **flags)
    config = tiny_run(corpus, **flags, **saving, keep_last=1, log_level="debug")
    environment = dict(server.environment)
    straight = run_on_ranks(RANKS, train_in, environment, plain)
    # Rank 1 is killed while its part of the second checkpoint is on its way.
    with pytest.raises(AssertionError, match=r"exit code|Connection|Read error|failed first"):
        run_on_ranks(RANKS, train_in, environment, config, "kill")
    assert folders.latest_iteration(address) == 2
    assert server.get(f"{folder}/latest_checkpointed_iteration.txt") == b"2\n"
    resumed = run_on_ranks(RANKS, train_in, environment, config)
    check_end(resumed, straight, steps=STEPS - 2)
    names = server.names(folder)
    content, _ = manifest.load(place(address) / "iter_0000004")
    assert names == sorted(
        [
            f"{folder}/latest_checkpointed_iteration.txt",
            *(f"{folder}/iter_0000004/{name}" for name in (manifest.NAME, *content.files)),
        ]
    )
    assert all(re.search(r"\.[0-9a-f]{8}\.safetensors$", name) for name in content.files)
    assert "successfully saved checkpoint at iteration 4 to s3://" in resumed[0][1]
    for _, output in resumed:
        assert SECRET not in output


def check_end(
    resumed: list[tuple[Record, str]], uninterrupted: list[tuple[Record, str]], *, steps: int
) -> None:
    found, straight = [record for record, _ in resumed], [record for record, _ in uninterrupted]
    for one, other in zip(found, straight, strict=True):
        assert isinstance(one, Record), one
        assert repr(one.steps) == repr(other.steps[-steps:])
    state, expected = whole(found), whole(straight)
    assert not [name for name in expected if not torch.equal(state[name], expected[name])]


def test_a_bucket_that_goes_away_is_the_same_error_on_every_rank(
    server: ObjectStore, tmp_path: Path
) -> None:
    results = run_on_ranks(RANKS, save_to_what_goes_away, dict(server.environment))
    assert results[0] == results[1]
    assert "failed while writing the checkpoint of iteration 2" in results[0]
    assert "s3://checkpoints/gone/iter_0000002/shard-0000" in results[0]
    assert "bucket does not exist" in results[0]
    assert SECRET not in results[0]


def save_to_what_goes_away(environment: dict[str, str]) -> str:
    from megatron.checkpoint.load import storage
    from megatron.mpu.context import ParallelContext
    from megatron.mpu.topology import Topology
    from tests.unit.checkpoint.toy import snapshot_at

    os.environ.update(environment)
    ctx = ParallelContext.build(Topology(dp=RANKS))
    real = store._Upload.finish

    def finish(upload) -> None:
        if "iter_0000002" in str(upload._path):
            raise FileNotFoundError("The specified bucket does not exist")
        real(upload)

    store._Upload.finish = finish
    folder = "s3://checkpoints/gone"
    storage.save_snapshot(folder, snapshot_at(1, RANKS, ctx.rank), iteration=1, ctx=ctx)
    try:
        storage.save_snapshot(folder, snapshot_at(1, RANKS, ctx.rank), iteration=2, ctx=ctx)
    except CheckpointError as error:
        assert storage.open_checkpoint(folder, ctx=ctx).manifest.iteration == 1
        return str(error)
    return "no error"


def weights_of(environment: dict[str, str], folder: str) -> dict[str, torch.Tensor]:
    os.environ.update(environment)
    loaded = load_model_for_inference(folder, device="cpu")
    return {name: tensor.detach().clone() for name, tensor in loaded.model.named_parameters()}


def test_a_model_in_a_bucket_is_used_without_a_copy_on_disk(
    server: ObjectStore, tmp_path: Path
) -> None:
    corpus, environment = write_tiny_corpus(tmp_path), dict(server.environment)
    places = [f"{server.address}/used", str(tmp_path / "used")]
    for save in places:
        run_on_ranks(1, train_in, environment, tiny_run(corpus, train_iters=1, save=save))
    there, here = (run_on_ranks(1, weights_of, environment, save)[0] for save in places)
    assert there.keys() == here.keys()
    assert all(torch.equal(there[name], here[name]) for name in here)
