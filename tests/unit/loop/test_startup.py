"""Before the first step: who is asked what, and what is printed and stored."""

import dataclasses
import json
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron.launch import Launch
from megatron.lengths import batch_schedule, duration
from megatron.loop import startup
from megatron.loop.startup import (
    agree_on_files,
    announce_deepspeed,
    announce_run,
    open_step_log,
)
from megatron.model.accounting import parameter_count
from megatron.model_build import model_build
from megatron.mpu.context import Group, ParallelContext
from megatron.progress import Progress
from tests.support.tiny import VOCABULARY, tiny_run
from tests.unit.engine.engines import runtime_of, tiny_engine


@pytest.mark.parametrize(
    ("ranks_here", "save", "expected"),
    [
        (1, "runs/a", ["runs/a", "corpora"]),
        (2, "runs/a", ["corpora"]),
        (1, None, ["corpora"]),
    ],
)
def test_several_nodes_have_to_see_one_folder_and_the_same_data(
    ranks_here: int, save: str | None, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[str] = []
    monkeypatch.setattr(startup, "refuse_separate_disks", lambda path, ctx: compared.append(path))
    monkeypatch.setattr(startup, "agree_on_data", lambda sources, world: compared.extend(sources))
    context = dataclasses.replace(ParallelContext.single(), world=Group((0, 1), 0))
    launch = Launch(world_size=2, local_world_size=ranks_here)
    agree_on_files(save, {"corpora": "a digest"}, launch, context)
    assert compared == expected


def test_a_run_is_announced_with_its_size_and_its_length(
    capsys: pytest.CaptureFixture[str],
) -> None:
    runtime = runtime_of(tiny_run("nowhere", train_iters=5))
    config, engine = runtime.config, tiny_engine()
    length = duration(config, batch_schedule(config, 1))
    build = model_build(runtime)
    announce_run(engine, config, runtime.context, build, length, Progress(2, 16, 256))
    output = capsys.readouterr().out
    parameters = parameter_count(config.model, VOCABULARY + 1, config.data.seq_length)
    assert f"gpt with {parameters:,} parameters in float64; 1 rank (tp 1 x pp 1 x dp 1)" in output
    assert "global batch 8 in micro-batches of 1; from iteration 2 to 5: 24 samples, 384" in output
    assert "MFLOP per token, forward and backward, by 6 N + 12 L a d s per token (PaLM" in output


def test_flags_and_the_json_of_deepspeed_are_stored(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tiny_run("nowhere", tensorboard_dir=str(tmp_path), deepspeed=True, fp64=False)
    config = dataclasses.replace(config, extra={"my_api_key": "s3cret"})
    runtime = runtime_of(config)
    length, build = duration(config, batch_schedule(config, 1)), model_build(runtime)
    task = tiny_engine().task
    timers, name = runtime.timers, runtime.run_name
    with open_step_log(task, config, runtime.context, build, length, Progress(), timers, name):
        announce_deepspeed(config, replicas=1)
    output = capsys.readouterr().out.partition("DeepSpeed's JSON, complete:\n")[2]
    given, _ = json.JSONDecoder().raw_decode(output)
    assert given["train_batch_size"] == 8
    events = EventAccumulator(str(tmp_path)).Reload()
    stored = {
        tag: events.Tensors(tag)[0].tensor_proto.string_val[0].decode()
        for tag in events.Tags()["tensors"]
    }
    assert set(stored) == {"flags/text_summary", "deepspeed/text_summary"}
    assert '"my_api_key": "(redacted)"' in stored["flags/text_summary"]
    assert name.value == "", "TensorBoard needs none"
