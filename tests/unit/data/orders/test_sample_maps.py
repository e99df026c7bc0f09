"""The compiled loops, their NumPy twins and a naive walk give the same bytes."""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.data.orders import sample_maps
from megatron.data.orders.sample_maps import (
    build_blending_indices,
    build_blending_indices_with_python,
    build_sample_idx,
    build_sample_idx_with_numpy,
)
from tests.support.examples import examples

REPOSITORY = Path(__file__).resolve().parents[4]


@pytest.fixture(scope="module", autouse=True)
def compiled(tmp_path_factory):
    """Without a module in place these tests build one, so that nothing is left unchecked."""
    if sample_maps.compiled_is_used():
        yield
        return
    module = _import_built(_build(tmp_path_factory.mktemp("build"), os.environ))
    before, sample_maps._built = sample_maps._built, module
    yield
    sample_maps._built = before


def _build(folder, environment):
    """Run setup.py on a copy of the sources; returns where the package was built."""
    for name in ("setup.py", "pyproject.toml", "csrc/data/sample_maps.cpp"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPOSITORY / name, folder / name)
    (folder / "README.md").touch()
    (folder / "megatron").mkdir()
    result = subprocess.run(
        [sys.executable, "setup.py", "build_ext", "--build-lib", "out"],
        cwd=folder,
        env=dict(environment),
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert result.returncode == 0, result.stderr
    (folder / "stderr").write_text(result.stderr)
    return folder


def _import_built(folder):
    (path,) = (folder / "out").rglob("_sample_maps*.so")
    spec = importlib.util.spec_from_file_location("megatron.data._sample_maps", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def walk(sizes, doc_idx, seq_length):
    """Every token's place listed one by one; every seq_length-th is where a sample starts."""
    places = [(p, o) for p, document in enumerate(doc_idx) for o in range(sizes[document])]
    rows = places[::seq_length][: (len(places) - 1) // seq_length + 1]
    return [(0, 0), *rows[1:]]


corpora = st.lists(st.integers(0, 9), min_size=1, max_size=12).filter(any)


@examples(150)
@given(corpora, st.integers(1, 12), st.integers(1, 4), st.randoms(), st.booleans())
def test_sample_index_of_compiled_twin_and_walk_are_equal(sizes, seq_length, epochs, rng, wide):
    order = list(range(len(sizes))) * epochs
    rng.shuffle(order)
    arguments = (
        np.array(sizes, np.int32),
        np.array(order, np.int64 if wide else np.int32),
    )
    numbers = {
        "seq_length": seq_length,
        "num_epochs": epochs,
        "tokens_per_epoch": sum(sizes),
    }
    compiled_rows = build_sample_idx(*arguments, **numbers)
    twin = build_sample_idx_with_numpy(*arguments, **numbers)
    assert compiled_rows.dtype == twin.dtype == np.int32
    assert compiled_rows.tobytes() == twin.tobytes()
    assert [tuple(row) for row in twin.tolist()] == walk(sizes, order, seq_length)
    assert len(twin) == (epochs * sum(sizes) - 1) // seq_length + 1


def naive_blend(weights, size):
    """The rule as it is written down: the largest lag wins, the first of equal ones."""
    shares = np.array(weights, np.float64) / np.sum(np.array(weights, np.float64))
    counts, chosen = np.zeros(len(weights)), []
    for k in range(size):
        chosen.append(int(np.argmax(shares * max(k, 1) - counts)))
        counts[chosen[-1]] += 1
    return chosen


@examples(100)
@given(st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=8), st.integers(0, 300))
def test_blends_of_compiled_twin_and_naive_rule_are_equal(weights, size):
    chosen, within = build_blending_indices(weights, size)
    chosen_twin, within_twin = build_blending_indices_with_python(weights, size)
    assert (chosen.dtype, within.dtype) == (np.uint8, np.int64)
    assert chosen.tobytes() == chosen_twin.tobytes()
    assert within.tobytes() == within_twin.tobytes()
    assert chosen.tolist() == naive_blend(weights, size)
    for component in range(len(weights)):
        drawn = within[chosen == component]
        assert drawn.tolist() == list(range(len(drawn)))


# Weights that tie at every step, at some, and nearly; of one size and of many.
WEIGHTS = (
    st.floats(1e-6, 1e6),
    st.sampled_from([1.0, 2.0, 3.0]),
    st.sampled_from([1.0, 1.0 + 2**-40, 1.0 + 2**-20, 1.0 - 2**-30]),
    st.sampled_from([1e-9, 1e-3, 1.0]),
)


@examples(60)
@given(
    st.sampled_from(WEIGHTS).flatmap(lambda kind: st.lists(kind, min_size=1, max_size=70)),
    st.sampled_from([257, 4096, 4500, 6145]),
)
def test_fixed_point_and_classes_of_equal_weights_change_nothing(weights, size):
    chosen, within = build_blending_indices(weights, size)
    chosen_twin, within_twin = build_blending_indices_with_python(weights, size)
    assert chosen.tobytes() == chosen_twin.tobytes()
    assert within.tobytes() == within_twin.tobytes()


@pytest.mark.parametrize("build", [build_blending_indices, build_blending_indices_with_python])
@pytest.mark.parametrize(
    ("weights", "chosen"),
    [
        ([0.3, 0.7], "1 0 1 1 0 1 1 0 1 1"),
        ([1, 0.3], "0 1 0 0 0 1 0 0 0 1"),
        ([0.1, 0.2, 0.7], "2 1 2 0 2 2 1 2 2 2 0 2 1 2 2 2 1 2 2 2"),
    ],
)
def test_blends_are_megatrons(build, weights, chosen):
    assert " ".join(map(str, build(weights, (len(chosen) + 1) // 2)[0].tolist())) == chosen


def test_a_blend_of_more_than_256_components_has_wider_numbers():
    chosen, _ = build_blending_indices([1.0] * 300, 600)
    assert chosen.dtype == np.uint16
    assert np.bincount(chosen).tolist() == [2] * 300
    assert chosen.tobytes() == build_blending_indices_with_python([1.0] * 300, 600)[0].tobytes()
    assert build_blending_indices([1.0] * 256, 1)[0].dtype == np.uint8


def test_rows_are_64_bit_when_positions_do_not_fit_in_32(monkeypatch):
    monkeypatch.setattr(sample_maps, "_MOST_INT32", 3)
    sizes = np.array([2, 3], np.int32)
    numbers = {"seq_length": 2, "num_epochs": 2, "tokens_per_epoch": 5}
    for dtype in (np.int32, np.int64):
        doc_idx = np.array([0, 1, 1, 0], dtype)
        rows = build_sample_idx(sizes, doc_idx, **numbers)
        twin = build_sample_idx_with_numpy(sizes, doc_idx, **numbers)
        assert rows.dtype == twin.dtype == np.int64
        assert rows.tobytes() == twin.tobytes()


def test_the_twin_is_the_same_in_small_chunks(monkeypatch):
    sizes = np.arange(1, 40, dtype=np.int32)
    numbers = {"seq_length": 3, "num_epochs": 1, "tokens_per_epoch": int(sizes.sum())}
    doc_idx = np.arange(39, dtype=np.int32)
    whole = build_sample_idx_with_numpy(sizes, doc_idx, **numbers)
    monkeypatch.setattr(sample_maps, "_CHUNK_ROWS", 7)
    assert build_sample_idx_with_numpy(sizes, doc_idx, **numbers).tobytes() == whole.tobytes()


def test_unaligned_sizes_of_a_mapped_index_are_accepted():
    buffer = bytearray(2 + 4 * 3)
    sizes = np.frombuffer(buffer, np.int32, 3, 2)
    sizes[:] = [4, 5, 6]
    assert not sizes.flags.aligned
    rows = build_sample_idx(
        sizes, np.arange(3, dtype=np.int32), seq_length=7, num_epochs=1, tokens_per_epoch=15
    )
    assert rows.tolist() == [[0, 0], [1, 3], [2, 5]]


@pytest.mark.parametrize("build", [build_sample_idx, build_sample_idx_with_numpy])
@pytest.mark.parametrize(
    ("doc_idx", "seq_length", "tokens", "message"),
    [
        ([0, 2], 2, 5, "names no document"),
        ([0, -1], 2, 5, "names no document"),
        ([], 2, 5, "names no document"),
        ([0, 1], 2, 6, "names 5 tokens, not 6"),
        ([0, 1], 0, 5, "seq_length 0"),
        ([0, 1], 2, 0, "0 tokens"),
    ],
)
def test_inputs_that_contradict_each_other_are_refused(build, doc_idx, seq_length, tokens, message):
    with pytest.raises(ValueError, match=message):
        build(
            np.array([2, 3], np.int32),
            np.array(doc_idx, np.int32),
            seq_length=seq_length,
            num_epochs=1,
            tokens_per_epoch=tokens,
        )


@pytest.mark.parametrize(
    ("weights", "size"),
    [([], 1), ([[1.0]], 1), ([np.nan], 1), ([-1.0, 2.0], 1), ([0.0], 1), ([1.0], -1)],
)
def test_weights_that_cannot_be_shares_are_refused(weights, size):
    with pytest.raises(ValueError, match="weights"):
        build_blending_indices(weights, size)


def test_the_compiled_module_refuses_wrong_arrays_by_itself():
    module = sample_maps._built
    sizes, doc_idx = np.array([2, 3], np.int32), np.array([0, 1], np.int32)
    with pytest.raises(TypeError):
        module.fill_sample_idx(sizes, doc_idx.astype(np.float32), 2, np.zeros((2, 2), np.int32))
    with pytest.raises(ValueError, match="too few tokens"):
        module.fill_sample_idx(sizes, doc_idx, 2, np.zeros((9, 2), np.int32))
    with pytest.raises(ValueError, match="names no document"):
        module.fill_sample_idx(sizes, doc_idx + 5, 2, np.zeros((2, 2), np.int32))
    with pytest.raises(ValueError, match=r"\[rows, 2\]"):
        module.fill_sample_idx(sizes, doc_idx, 2, np.zeros((2, 3), np.int32))
    with pytest.raises(ValueError, match="differ in length"):
        module.fill_blending_indices(np.ones(2), np.zeros(3, np.uint8), np.zeros(4, np.int64))


@pytest.mark.parametrize("built", ["none", "old"])
def test_without_a_compiled_module_the_twin_serves_and_says_so(monkeypatch, capsys, built):
    from megatron import log

    class Old:
        INTERFACE = 0

    monkeypatch.setattr(sample_maps, "_built", None if built == "none" else Old())
    monkeypatch.setattr(log._OUTPUT, "warned", set())
    sizes, doc_idx = np.array([2, 3], np.int32), np.array([0, 1], np.int32)
    for _ in range(2):
        rows = build_sample_idx(sizes, doc_idx, seq_length=2, num_epochs=1, tokens_per_epoch=5)
        build_blending_indices([1.0], 3)
    assert rows.tolist() == [[0, 0], [1, 0], [1, 2]]
    output = capsys.readouterr().err
    assert output.count("its Python twin is used") == 1
    assert ("is not built" if built == "none" else "built from other source") in output


def test_the_package_installs_without_a_compiler_and_says_so_once(tmp_path):
    broken = dict(os.environ) | {"CC": "/bin/false", "CXX": "/bin/false"}
    folder = _build(tmp_path, broken)
    assert list(folder.rglob("*.so")) == []
    output = (folder / "stderr").read_text()
    assert output.count("NOT BUILT: megatron.data._sample_maps") == 1
    assert "NOT BUILT: megatron.peers._native_stacks" in output
    assert "no stacks of native code are printed" in output
    assert "python setup.py build_ext --inplace" in output
