"""Generators go through a checkpoint's flat form and continue exactly."""

import json
import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from megatron.checkpoint import rng
from megatron.checkpoint.folder.manifest import GridLayout
from megatron.checkpoint.sharded import GeneratorStates
from megatron.errors import CheckpointError
from megatron.mpu.topology import Topology
from tests.unit.checkpoint.folder.test_manifest import example


def draws():
    return [torch.rand(3).tolist(), np.random.rand(3).tolist(), random.random()]


def test_every_generator_continues_after_json_and_back():
    random.gauss(0, 1)  # leaves a spare number behind, which is state too
    states = rng.capture()
    expected = draws()
    draws()
    kept = GeneratorStates(
        {name: tensor.clone() for name, tensor in states.tensors.items()},
        json.loads(json.dumps(states.values)),
    )
    rng.restore(kept)
    assert draws() == expected


def test_states_of_streams_that_older_versions_saved_are_not_read():
    states = rng.capture()
    streams = {"streams/tensor": torch.zeros(8, dtype=torch.uint8)}
    rng.restore(GeneratorStates({**states.tensors, **streams}, states.values))


def test_states_go_back_only_into_the_same_grid():
    names = ("g0", "g1")
    content = example(generators=names, layout=GridLayout(tp=2, pp=1, dp=1))
    assert rng.why_not_restorable(content, Topology(tp=2)) is None
    reason = rng.why_not_restorable(content, Topology(dp=2))
    assert reason == "random states were saved at tp=2 pp=1 dp=1, this is tp=1 pp=1 dp=2"
    reason = rng.why_not_restorable(content, Topology(cp=2))
    assert reason == "random states were saved at tp=2 pp=1 dp=1, this is tp=1 pp=1 dp=1 cp=2"
    other = rng.why_not_restorable(content, Topology(tp=2, pp_before_dp=True))
    assert other == "random states were saved with ranks in another order (--use-tp-pp-dp-mapping)"
    mapped = replace(content, config={"parallel": {"use_tp_pp_dp_mapping": True}})
    assert rng.why_not_restorable(mapped, Topology(tp=2, pp_before_dp=True)) is None
    assert "without random states" in rng.why_not_restorable(example(), Topology(tp=2))


def test_states_of_another_kind_of_device_are_told_and_refused():
    states = rng.capture()
    assert rng.device_mismatch(states) is None
    moved = GeneratorStates(states.tensors, {**states.values, "device_type": "cuda"})
    assert rng.device_mismatch(moved) == "random states were saved on cuda, this run uses cpu"
    with pytest.raises(CheckpointError, match="another kind of device"):
        rng.restore(moved)
