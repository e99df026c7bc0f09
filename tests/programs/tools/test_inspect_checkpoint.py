"""tools/inspect_checkpoint.py, started as a user would start it."""

import dataclasses
import json
import os
import sys
from pathlib import Path

import pytest

from megatron.arguments import parse_args
from megatron.checkpoint.formats import registry
from megatron.checkpoint.load import storage
from megatron.checkpoint.source import WriteOptions
from megatron.mpu.context import ParallelContext
from tests.support.checkpoints.megatron_files import Shape, save_megatron, whole_model
from tests.support.checkpoints.object_store import object_store
from tests.support.checkpoints.sources import MemorySource
from tests.support.launch import run_program
from tests.unit.checkpoint.toy import snapshot_at
from tests.unit.config.groups import a_run
from tools import inspect_checkpoint

REPOSITORY = Path(__file__).parents[3]
TOOL = REPOSITORY / "tools" / "inspect_checkpoint.py"
MISSING_OR_DAMAGED = 66  # CheckpointError.exit_code


def inspect(*arguments, cwd=REPOSITORY):
    return run_program([sys.executable, str(TOOL), *map(str, arguments)], cwd=cwd)


@pytest.fixture
def folder(tmp_path):
    for iteration in (5, 10):
        snapshot = snapshot_at(1, 1, 0, iteration=iteration)
        storage.save_snapshot(tmp_path, snapshot, iteration=iteration, ctx=ParallelContext.single())
    return tmp_path


def test_it_says_what_the_latest_checkpoint_holds(folder, tmp_path_factory):
    ended = inspect(folder, cwd=tmp_path_factory.mktemp("elsewhere"))
    assert ended.status == 0, ended.err
    for text in (
        "iteration 10",
        "layout: tp=1 pp=1 dp=1 (1 ranks)",
        'progress: {"iteration": 10, "consumed_samples": 80}',
        'scalars: {"loss_scale": 4096.0}',
        "  model/\n    embedding.word  BF16 [13, 6]  156",
        "  optimizer/\n    exp_avg/\n      embedding.word  F32 [13, 6]  312",
    ):
        assert text in ended.out
    assert ended.err == ""


def test_an_iteration_can_be_named_by_number_or_by_its_folder(folder):
    for ended in (inspect(folder, "--iteration", 5), inspect(folder / "iter_0000005")):
        assert "iteration 5," in ended.out


def test_json_is_for_programs(folder):
    ended = inspect(folder, "--json", "--verify")
    content = json.loads(ended.out)
    assert content["iteration"] == 10
    assert content["tensors"]["model/qkv.weight"]["shape"] == [12, 6]


def test_the_flags_of_the_run_are_printed_as_a_config_file(tmp_path):
    run = a_run()
    snapshot = dataclasses.replace(snapshot_at(1, 1, 0, iteration=5), config=run.to_plain())
    folder = tmp_path / "save"
    storage.save_snapshot(folder, snapshot, iteration=5, ctx=ParallelContext.single())
    printed = tmp_path / "run.yaml"
    printed.write_text(inspect(folder, "--config").out)
    assert parse_args(["--config", str(printed)]) == run


def test_verify_reads_every_byte(folder):
    ended = inspect(folder, "--verify")
    assert (ended.status, "verified: 2 files" in ended.out) == (0, True)
    path = folder / "iter_0000010" / "shard-00000-of-00001.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert inspect(folder).status == 0, "lengths are right"
    ended = inspect(folder, "--verify")
    assert ended.status == MISSING_OR_DAMAGED
    assert str(path) in ended.err
    assert "verified" not in ended.out


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: os.truncate(f / "iter_0000010" / "generators-00000.safetensors", 9), "9 bytes"),
        (lambda f: (f / "latest_checkpointed_iteration.txt").unlink(), "tracker file is missing"),
        (lambda f: (f / "iter_0000010" / "manifest.json").unlink(), "manifest.json: no such file"),
    ],
)
def test_trouble_is_one_message_and_an_exit_code(folder, damage, message):
    damage(folder)
    ended = inspect(folder)
    assert ended.status == MISSING_OR_DAMAGED
    assert message in ended.err
    assert "Traceback" not in ended.err


def test_a_missing_iteration_is_said(folder):
    ended = inspect(folder, "--iteration", 7)
    assert ended.status == MISSING_OR_DAMAGED
    assert "iteration 7 is not in the checkpoint folder" in ended.err


def test_it_needs_no_torch(folder):
    program = (
        "import runpy, sys\n"
        "sys.modules['torch'] = None  # an import of it would raise\n"
        f"sys.argv = ['inspect', {str(folder)!r}, '--verify']\n"
        f"runpy.run_path({str(TOOL)!r}, run_name='__main__')\n"
    )
    ended = run_program([sys.executable, "-c", program], cwd=REPOSITORY)
    assert ended.status == 0, ended.err
    assert "verified: 2 files" in ended.out


def test_without_torch_a_folder_of_something_else_is_refused_as_no_checkpoint_of_ours(tmp_path):
    save_megatron(tmp_path, whole_model(Shape()), Shape())
    program = (
        "import runpy, sys\n"
        "sys.modules['torch'] = None\n"
        f"sys.argv = ['inspect', {str(tmp_path)!r}]\n"
        f"runpy.run_path({str(TOOL)!r}, run_name='__main__')\n"
    )
    ended = run_program([sys.executable, "-c", program], cwd=REPOSITORY)
    assert ended.status == MISSING_OR_DAMAGED, ended.err
    assert "iter_0000010/manifest.json: no such file" in ended.err


def test_what_is_at_an_address_is_told_as_if_it_were_in_a_folder(folder):
    with object_store() as server:
        at, ctx = f"{server.address}/team/run", ParallelContext.single()
        for iteration in (5, 10):
            snapshot = snapshot_at(1, 1, 0, iteration=iteration)
            storage.save_snapshot(at, snapshot, iteration=iteration, ctx=ctx)
        ended, local = inspect(at, "--verify"), inspect(folder)
        assert ended.status == 0, ended.err
        assert f"{at}/iter_0000010\niteration 10, written" in ended.out
        assert "verified: 2 files" in ended.out
        tree = local.out[local.out.index("tensors: ") :]
        assert tree in ended.out
        for arguments in ((at, "--iteration", 5), (f"{at}/iter_0000005",)):
            ended = inspect(*arguments, "--json")
            assert json.loads(ended.out)["directory"] == f"{at}/iter_0000005", ended.err
        (shard,) = [name for name in server.names() if "iter_0000010/shard" in name]
        data = bytearray(server.get(shard))
        data[-1] ^= 1
        server.put(shard, bytes(data))
        ended = inspect(at, "--verify")
        assert ended.status == MISSING_OR_DAMAGED
        assert f"s3://checkpoints/{shard}: expected xxh3" in ended.err
        server.client.delete_object(Bucket="checkpoints", Key="team/run/iter_0000010/manifest.json")
        ended = inspect(at)
        assert ended.status == MISSING_OR_DAMAGED
        assert f"{at}/iter_0000010/manifest.json: no such file" in ended.err
        ended = inspect("s3://someone:secret@checkpoints/run")
        assert (ended.status, "secret" in ended.err) == (64, False)


def test_the_latest_is_told_whatever_its_format(folder):
    save_megatron(folder, whole_model(Shape()), Shape(), iteration=20)
    ended = inspect(folder)
    assert "format: megatron" in ended.out, ended.err
    assert "iteration 10," in inspect(folder, "--iteration", 10).out


def test_other_formats_are_told_by_the_names_that_they_would_have_here(tmp_path):
    directory = save_megatron(tmp_path, whole_model(Shape()), Shape(), tp=2, pp=2)
    ended = inspect(tmp_path, "--verify")
    assert ended.status == 0, ended.err
    for text in (
        "format: megatron",
        '"consumed_samples": 80',
        "  model/\n    embedding.word.weight  F32 [44, 16]  2,816",
        "layers.3.attention.qkv.weight  F32 [48, 16]",
        "verified",
    ):
        assert text in ended.out
    content = json.loads(inspect(directory, "--json").out)
    assert (content["format"], content["progress"]["iteration"]) == ("megatron", 10)
    assert content["tensors"]["model/final_norm.bias"]["bytes"] == 64
    path = directory / "mp_rank_01_001" / "model_optim_rng.pt"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    ended = inspect(tmp_path, "--verify")
    assert ended.status == MISSING_OR_DAMAGED
    assert "mp_rank_01_001" in ended.err


@pytest.mark.parametrize("name", registry.writable())
def test_what_any_format_holds_is_told_alike(tmp_path, monkeypatch, capsys, name):
    source = MemorySource.of_gpt(optimizer=name != "huggingface")
    options = WriteOptions(copy_tokenizer=False)
    registry.get(name).write(source, tmp_path / "to", options)
    capsys.readouterr()
    monkeypatch.setattr(sys, "argv", ["inspect", str(tmp_path / "to"), "--verify"])
    inspect_checkpoint.main()
    output = capsys.readouterr().out
    assert "    layers.1.mlp.fc2.weight  F32 [8, 32]  1,024" in output
    assert ("      layers.1.mlp.fc2.weight  F32 [8, 32]  1,024" in output) == (
        name != "huggingface"
    )
    assert "verified" in output


def test_a_folder_of_something_else_is_said(tmp_path):
    (tmp_path / "notes.txt").write_text("not a checkpoint")
    ended = inspect(tmp_path)
    assert ended.status == MISSING_OR_DAMAGED
    assert "has never held a checkpoint" in ended.err
