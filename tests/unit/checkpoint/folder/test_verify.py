"""Damage is found wherever it is, and described by file and tensor."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.checkpoint.folder import manifest as manifests
from megatron.checkpoint.folder import verify
from megatron.checkpoint.load import storage
from megatron.errors import CheckpointError
from megatron.mpu.context import ParallelContext
from tests.unit.checkpoint.toy import snapshot_at

FLIPS = 60


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """One checkpoint for the module; a test that damages it repairs it."""
    folder = tmp_path_factory.mktemp("save")
    saved = storage.save_snapshot(
        folder, snapshot_at(1, 1, 0), iteration=100, ctx=ParallelContext.single()
    )
    return saved.directory, manifests.load(saved.directory)[0]


def test_a_whole_checkpoint_has_no_damage(checkpoint):
    directory, content = checkpoint
    assert verify.wrong_digests(directory, content, content.files) == []


def test_a_bit_flipped_anywhere_in_any_file_is_found(checkpoint):
    directory, content = checkpoint
    draw = random.Random(2)
    for name in content.files:
        path = directory / name
        good = path.read_bytes()
        for at in [0, 8, len(good) - 1, *(draw.randrange(len(good)) for _ in range(FLIPS))]:
            bad = bytearray(good)
            bad[at] ^= 1 << draw.randrange(8)
            path.write_bytes(bad)
            damages = verify.wrong_digests(directory, content, content.files)
            assert [damage.file for damage in damages] == [name]
        path.write_bytes(good)


def test_the_tensor_that_was_hit_is_named(checkpoint):
    directory, content = checkpoint
    path = directory / "shard-00000-of-00001.safetensors"
    good = path.read_bytes()
    path.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    (damage,) = verify.wrong_digests(directory, content, content.files)
    path.write_bytes(good)
    assert len(damage.tensors) == 1
    error = verify.damage_error(directory, [damage])
    assert str(path) in str(error)
    assert f"hit: {damage.tensors[0]}" in str(error)
    assert damage.expected.startswith("xxh3 ")
    assert damage.expected != damage.found


def test_files_that_are_read_at_the_same_time_are_judged_alike(checkpoint):
    directory, content = checkpoint
    good = {name: (directory / name).read_bytes() for name in content.files}
    for name, data in good.items():
        (directory / name).write_bytes(bytes([data[0] ^ 1]) + data[1:])
    one, several = (
        verify.wrong_digests(directory, content, content.files, threads=threads)
        for threads in (1, 3)
    )
    for name, data in good.items():
        (directory / name).write_bytes(data)
    assert several == one
    assert [damage.file for damage in several] == list(content.files)


@pytest.mark.parametrize("check", [verify.wrong_sizes, verify.wrong_digests])
def test_missing_and_truncated_files_are_found_by_length(checkpoint, check):
    directory, content = checkpoint
    first, second = content.files
    good = {name: (directory / name).read_bytes() for name in content.files}
    (directory / first).unlink()
    (directory / second).write_bytes(good[second][:-3])
    damages = check(directory, content, content.files)
    for name, data in good.items():
        (directory / name).write_bytes(data)
    size = len(good[second])
    assert [d[:3] for d in damages] == [
        (first, f"{len(good[first])} bytes", "no such file"),
        (second, f"{size} bytes", f"{size - 3} bytes"),
    ]


def test_much_damage_is_summed_up(tmp_path):
    damage = verify.DamagedFile("f", "1 bytes", "2 bytes", tuple("abcdefghij"))
    with pytest.raises(CheckpointError, match="checkpoint is damaged") as caught:
        raise verify.damage_error(tmp_path, [damage] * 10)
    assert "and 2 more files" in str(caught.value)
    assert "h and 2 more" in str(caught.value)


@given(st.data())
def test_each_host_checks_what_its_ranks_read_and_all_files_are_checked(data):
    files = {f"f{i}": data.draw(st.integers(0, 100)) for i in range(data.draw(st.integers(0, 6)))}
    ranks = data.draw(st.integers(1, 5))
    hosts = [data.draw(st.sampled_from("ab")) for _ in range(ranks)]
    subsets = st.sets(st.sampled_from(sorted(files))) if files else st.just(set())
    needs = [data.draw(subsets) for _ in range(ranks)]
    shares = verify.shares(files, needs, hosts)
    checks = [(hosts[rank], name) for rank in range(ranks) for name in shares[rank]]
    needed = {(host, name) for host, need in zip(hosts, needs) for name in need}
    assert needed <= set(checks)
    assert len(checks) == len(set(checks)), "no host checks a file twice"
    assert {name for _, name in checks} == set(files)
    assert len(checks) == len(needed) + len(set(files) - {name for _, name in needed})
