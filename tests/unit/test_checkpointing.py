"""What of a run is kept, what comes back, and what is refused rather than guessed."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.checkpoint import rng
from megatron.checkpoint.folder import manifest
from megatron.checkpoint.folder.run_folder import iterations
from megatron.checkpoint.load.stored_run import flags_of_checkpoint
from megatron.checkpoint.save.background import BackgroundSaves
from megatron.checkpointing import load_checkpoint, reserve_for_saves, save_checkpoint
from megatron.config.models.encoder_decoder import EncoderDecoderConfig
from megatron.config.run import RunConfig
from megatron.engine.base import PretrainTask, StepPlan, StepReport
from megatron.engine.native import NativeEngine
from megatron.errors import CheckpointError, ConfigError
from megatron.global_vars import Runtime
from megatron.model_build import model_build
from megatron.mpu.topology import Topology
from megatron.ops.library import kernels_in_use
from megatron.ops.scaled_matmul import EMULATED
from megatron.progress import Progress
from megatron.trained_model import load_model_for_inference
from pretrain_bert import bert_task
from pretrain_gpt import gpt_task
from pretrain_ict import ict_task
from pretrain_prefix_lm import prefix_lm_task
from pretrain_t5 import t5_task
from tests.support.checkpoints.megatron_files import Shape, save_megatron, whole_model
from tests.support.tiny import tiny_run
from tests.unit.engine.engines import runtime_of, tiny_batches

PLAN = StepPlan(
    num_microbatches=2,
    global_batch_size=2,
    learning_rate=0.01,
    weight_decay=0.1,
    seq_length=16,
    first_sample=0,
)
AT = Progress(iteration=3, consumed_samples=24, consumed_tokens=384, skipped_iterations=1)


@dataclasses.dataclass
class Run:
    """An engine and its runtime, on this process alone."""

    runtime: Runtime
    engine: NativeEngine

    @property
    def config(self) -> RunConfig:
        return self.runtime.config

    def step(self) -> StepReport:
        return self.engine.train_step(iter(tiny_batches(2)), PLAN)

    def save(self, *, at: int | None = None) -> None:
        progress = AT if at is None else dataclasses.replace(AT, iteration=at)
        save_checkpoint(self.config, self.engine, progress, self.runtime)

    def load(self) -> Progress:
        return load_checkpoint(self.config, self.engine, self.runtime)

    def weights(self) -> list[torch.Tensor]:
        return [parameter.detach().clone() for parameter in self.engine.stage.parameters()]

    def generators(self) -> dict[str, Any]:
        states = rng.capture()
        return {**states.tensors, **states.values}


def run_of(task: PretrainTask | None = None, **flags: Any) -> Run:
    runtime = runtime_of(tiny_run("nowhere", log_level="info", hidden_dropout=0.1, **flags))
    build = model_build(runtime)
    return Run(runtime, NativeEngine(runtime.config, task or gpt_task(), build, runtime.tokenizer))


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """A checkpoint of iteration 3, two updates after the start."""
    run = run_of(save=str(tmp_path / "run"))
    run.step()
    run.step()
    run.save()
    return str(tmp_path / "run")


def equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def same_generators(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(
        torch.equal(one[name], other[name])
        if isinstance(one[name], torch.Tensor)
        else one[name] == other[name]
        for name in one
    )


def test_without_load_and_save_nothing_is_read_or_written(
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = run_of()
    run.save()
    assert run.load() == Progress()
    assert capsys.readouterr().out == ""


def test_a_checkpoint_brings_back_everything(folder: str, capsys: Any) -> None:
    first = run_of(save=folder)
    first.step()
    first.step()
    first.save()
    assert "successfully saved checkpoint at iteration 3 to" in capsys.readouterr().out
    kept = first.generators()
    torch.rand(1)
    second = run_of(load=folder)
    assert second.load() == AT
    output = capsys.readouterr()
    assert "successfully loaded checkpoint from" in output.out
    assert output.err == "", "nothing has changed, so nothing is said"
    assert equal(first.weights(), second.weights())
    assert same_generators(second.generators(), kept)
    assert first.engine.state(optimizer=True).scalars == second.engine.state(optimizer=True).scalars
    states = [
        {t.name: t.parts[0].view for t in run.engine.state(optimizer=True).tensors}
        for run in (first, second)
    ]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_a_run_begins_with_pretrained_weights_and_resumes_with_its_own(
    folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    here = str(tmp_path / "tuned")
    flags = {"save": here, "load": here, "pretrained_checkpoint": folder}
    part = {"load_except": ("layers.1.*",)}
    tuned = run_of(**flags, **part)
    fresh, weights = tuned.weights(), run_of(load=folder)
    assert tuned.load() == Progress()
    said = f"*** {here} has never held a checkpoint: starting from {folder} ***"
    assert said in capsys.readouterr().out
    weights.load()
    names = [name for name, _ in tuned.engine.stage.named_parameters()]
    for name, loaded, before, there in zip(names, tuned.weights(), fresh, weights.weights()):
        assert torch.equal(loaded, before if name.startswith("layers.1.") else there), name
    tuned.step()
    tuned.save()
    resumed = run_of(**flags, **part)
    assert resumed.load() == AT
    assert equal(resumed.weights(), tuned.weights())


def test_the_first_start_of_a_run_that_resumes_says_that_it_is_fresh(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    here = str(tmp_path / "new")
    assert run_of(save=here, load=here).load() == Progress()
    assert f"*** {here} has never held a checkpoint: starting from random weights ***" in (
        capsys.readouterr().out
    )


def test_a_missing_checkpoint_is_never_a_fresh_start(tmp_path: Path) -> None:
    run = run_of(load=str(tmp_path / "none"))
    before = run.weights()
    with pytest.raises(CheckpointError, match="does not exist"):
        run.load()
    assert equal(before, run.weights())


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"layernorm_epsilon": 1e-6}, "--layernorm-epsilon 1e-05 in the checkpoint, 1e-06 here"),
        ({"num_layers": 3}, "--num-layers 2 in the checkpoint, 3 here"),
        ({"seq_length": 8}, "--seq-length 16 in the checkpoint, 8 here"),
    ],
)
def test_another_model_is_refused_before_anything_is_touched(
    folder: str, flags: dict[str, Any], words: str
) -> None:
    run = run_of(load=folder, **flags)
    before = run.weights()
    with pytest.raises(CheckpointError, match="of another model than the flags describe") as caught:
        run.load()
    assert words in str(caught.value)
    assert equal(before, run.weights())


@pytest.fixture
def bert_folder(tmp_path: Path) -> str:
    """A checkpoint of a BERT with both heads."""
    run_of(bert_task(), save=str(tmp_path / "bert")).save()
    return str(tmp_path / "bert")


def test_another_decoder_is_refused_before_anything_is_touched(tmp_path: Path) -> None:
    def of_depth(layers: int, **flags: Any) -> Run:
        decoder = EncoderDecoderConfig(decoder_num_layers=layers)
        task = t5_task(decoder, tiny_run("nowhere").data)
        return run_of(task, decoder_num_layers=layers, **flags)

    folder = str(tmp_path / "t5")
    of_depth(2, save=folder).save()
    assert of_depth(0, load=folder).load() == AT, "0 stands for the layers of the encoder"
    with pytest.raises(CheckpointError, match="of another model than the flags describe") as caught:
        of_depth(1, load=folder).load()
    assert "--decoder-num-layers 2 in the checkpoint, 1 here" in str(caught.value)
    given = {"load": folder, "use_mp_args_from_checkpoint_args": True}
    taken = flags_of_checkpoint(given)
    assert (taken["decoder_num_layers"], taken["pipeline_model_parallel_split_rank"]) == (2, None)
    with pytest.raises(CheckpointError, match="of another kind of model") as caught:
        run_of(load=folder).load()
    assert "holds a T5 (kind t5), and this run takes a GPT" in str(caught.value)


def test_a_checkpoint_records_what_was_trained(folder: str, bert_folder: str) -> None:
    for path, kind in ((folder, "gpt"), (bert_folder, "bert")):
        content, _ = manifest.load(Path(path) / "iter_0000003")
        assert content.model_kind == content.kind == kind


def test_another_kind_of_model_is_refused_by_both_names(folder: str, bert_folder: str) -> None:
    cases = [
        (run_of(load=bert_folder), "holds a BERT (kind bert), and this run takes a GPT"),
        (run_of(bert_task(), load=folder), "holds a GPT (kind gpt), and this run takes a BERT"),
    ]
    for run, words in cases:
        before = run.weights()
        with pytest.raises(CheckpointError, match="of another kind of model") as caught:
            run.load()
        assert words in str(caught.value)
        assert equal(before, run.weights())


def test_the_kind_of_an_older_checkpoint_is_told_by_its_names(bert_folder: str) -> None:
    path = Path(bert_folder) / "iter_0000003"
    content, _ = manifest.load(path)
    older = dataclasses.replace(content, model_kind=None)
    (path / manifest.NAME).write_bytes(manifest.encode(older))
    assert run_of(bert_task(), load=bert_folder).load() == AT
    with pytest.raises(CheckpointError, match="of another kind of model"):
        run_of(load=bert_folder).load()


def test_a_program_for_gpts_refuses_a_bert_before_it_builds_one(bert_folder: str) -> None:
    with pytest.raises(CheckpointError, match="kind of model than this program takes") as caught:
        load_model_for_inference(bert_folder, device="cpu")
    assert "holds a BERT (kind bert), and this program takes a GPT (kind gpt)" in str(caught.value)


def test_a_prefix_lm_begins_with_the_weights_of_a_gpt_and_says_what_it_is(
    folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(CheckpointError, match="of another kind of model") as raised:
        run_of(prefix_lm_task(), load=folder).load()
    assert "begins with its weights by --finetune" in str(raised.value)
    own = str(tmp_path / "prefix")
    run = run_of(prefix_lm_task(), load=folder, finetune=True, save=own)
    assert run.load() == Progress()
    assert "the weights of another kind of model: gpt" in capsys.readouterr().out
    gpt = run_of(load=folder)
    gpt.load()
    assert equal(run.weights(), gpt.weights())
    run.save()
    again = run_of(prefix_lm_task(), load=own)
    assert again.load() == AT
    with pytest.raises(CheckpointError, match=r"a prefix LM \(kind prefix_lm\), and this run"):
        run_of(load=own).load()


def test_parts_of_another_kind_may_be_asked_for(bert_folder: str, capsys: Any) -> None:
    flags = {"load": bert_folder, "finetune": True, "load_only": ("layers.*",)}
    assert run_of(**flags).load() == Progress()
    assert "loading parts of another kind of model: bert into gpt" in capsys.readouterr().err


def test_a_program_that_begins_with_parts_takes_only_its_own(folder: str, bert_folder: str) -> None:
    task = dataclasses.replace(bert_task(), name="classifier", begins_with=("bert",))
    flags = {"finetune": True, "load_only": ("layers.*",)}
    assert run_of(task, load=bert_folder, **flags).load() == Progress()
    with pytest.raises(CheckpointError, match="of another kind of model") as raised:
        run_of(task, load=folder, **flags).load()
    assert "this run takes a BERT (kind bert)" in str(raised.value.found)
    assert run_of(task, load=bert_folder, fp64=False, **flags).load() == Progress()  # is cast
    with pytest.raises(CheckpointError, match="F64 in the checkpoint and F32 in this run"):
        run_of(bert_task(), load=bert_folder, fp64=False, **flags).load()
    with pytest.raises(CheckpointError, match="of another kind of model"):
        run_of(task, load=bert_folder, finetune=True).load()
    with pytest.raises(CheckpointError, match="of another model than the flags describe"):
        run_of(task, load=bert_folder, layernorm_epsilon=1e-3, **flags).load()


def test_heads_that_are_not_there_are_said_with_the_flag_that_fits(bert_folder: str) -> None:
    words_alone = bert_task(order_head=False)
    with pytest.raises(CheckpointError, match="has other heads than this run") as caught:
        run_of(words_alone, load=bert_folder).load()
    assert "drop --bert-no-binary-head" in str(caught.value)
    without = {"finetune": True, "load_except": ("pooler.*", "order_head.*")}
    assert run_of(words_alone, load=bert_folder, **without).load() == Progress()


def test_flags_that_do_not_change_what_weights_mean_may_differ(folder: str) -> None:
    flags = {"init_method_std": 0.1, "output_layer_init_method_std": 0.2}
    assert run_of(load=folder, attention_dropout=0.3, **flags).load() == AT


def test_another_spelling_of_the_same_network_is_the_same_model(folder: str) -> None:
    spelled = {"num_query_groups": 4, "kv_channels": 4, "openai_gelu": True, "rotary_base": 7.0}
    assert run_of(load=folder, **spelled).load() == AT


def test_a_checkpoint_from_before_a_flag_was_there_is_the_models_of_its_default(
    folder: str, capsys: Any
) -> None:
    path = Path(folder) / "iter_0000003"
    content, _ = manifest.load(path)
    config = {name: dict(group) for name, group in content.config.items()}
    del config["model"]["qk_layernorm"], config["training"]["seed"], config["engine"]
    older = dataclasses.replace(content, config=config)
    (path / manifest.NAME).write_bytes(manifest.encode(older))
    assert run_of(load=folder).load() == AT
    assert "other flags" not in capsys.readouterr().err
    with pytest.raises(CheckpointError, match="of another model") as caught:
        run_of(load=folder, qk_layernorm=True).load()
    assert "--qk-layernorm False in the checkpoint, True here" in str(caught.value)


def test_other_training_flags_are_allowed_and_said(folder: str, capsys: Any) -> None:
    assert run_of(load=folder, lr=0.5, clip_grad=2.0, cpu_torch_adam=True).load() == AT
    output = capsys.readouterr().err
    assert "--cpu-torch-adam False -> True" in output
    assert "WARNING: resuming with other flags than the checkpoint's" in output
    assert "--clip-grad 0.5 -> 2.0" in output
    assert "--lr 0.01 -> 0.5" in output


def test_other_kernels_than_the_checkpoints_are_said(
    folder: str, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run_of(load=folder).load() == AT
    assert "kernels" not in capsys.readouterr().err
    monkeypatch.setattr("megatron.checkpointing.kernels_in_use", lambda: "other")
    assert run_of(load=folder).load() == AT
    assert f"other kernels than the checkpoint's ({kernels_in_use()} -> other)" in (
        capsys.readouterr().err
    )


def test_how_products_in_fp8_are_computed_is_recorded_and_changes_are_said(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    fp8 = {"fp8_format": "hybrid"}
    run = run_of(save=str(tmp_path / "run"), hidden_size=32, **fp8)
    run.save()
    content, _ = manifest.load(tmp_path / "run" / "iter_0000003")
    assert content.written_by["fp8"] == EMULATED
    resumed: dict[str, Any] = {"load": str(tmp_path / "run"), "hidden_size": 32}
    assert run_of(**resumed, **fp8).load() == AT
    assert capsys.readouterr().err == "", "nothing has changed, so nothing is said"
    assert run_of(**resumed, fp8_format="e4m3").load() == AT
    assert "--fp8-format hybrid -> e4m3" in capsys.readouterr().err
    assert run_of(**resumed).load() == AT
    assert "--fp8-format hybrid -> None" in capsys.readouterr().err
    monkeypatch.setattr("megatron.checkpointing.scaled_matmul_kind", lambda *of: "other")
    assert run_of(**resumed, **fp8).load() == AT
    assert f"other products in FP8 than the checkpoint's ({EMULATED} -> other)" in (
        capsys.readouterr().err
    )


def test_histories_of_fp8_come_back_or_start_empty_with_a_note(tmp_path: Path, capsys: Any) -> None:
    wide = {"hidden_size": 32, "num_layers": 3}
    fp8 = {**wide, "fp8_format": "hybrid", "fp8_recipe": "delayed", "fp8_amax_history_len": 4}
    run = run_of(save=str(tmp_path / "run"), **fp8)
    for _ in range(2):
        run.step()
    run.save()
    resumed = run_of(load=str(tmp_path / "run"), **fp8)
    capsys.readouterr()
    assert resumed.load() == AT
    assert "start empty" not in capsys.readouterr().out
    assert repr(resumed.step()) == repr(run.step())
    assert histories_of(resumed).keys() == histories_of(run).keys()
    for name, values in histories_of(resumed).items():
        assert torch.equal(values, histories_of(run)[name])
        assert (values[:, :3] > 0).all()
    for changed, missing in (
        ({"fp8_amax_history_len": 5}, "12 of 12"),
        ({"fp8_recipe": "tensorwise", "fp8_amax_history_len": None}, None),
    ):
        other = run_of(load=str(tmp_path / "run"), **fp8 | changed)
        assert other.load() == AT
        said = capsys.readouterr().out
        assert ("start empty" in said) == (missing is not None)
        assert missing is None or f"for {missing} layers in FP8" in said
        assert not any(values.any() for values in histories_of(other).values())
    without = {**fp8, "first_last_layers_bf16": True}
    older = run_of(save=str(tmp_path / "older"), **without)
    older.step()
    older.save()
    more = run_of(load=str(tmp_path / "older"), **fp8)
    assert more.load() == AT
    assert "for 8 of 12 layers in FP8" in capsys.readouterr().out
    assert not any(values.any() for values in histories_of(more).values())


def histories_of(run: Run) -> dict[str, torch.Tensor]:
    tensors = run.engine.state(optimizer=True).tensors
    return {one.name: one.parts[0].view for one in tensors if one.name.startswith("fp8/")}


def test_data_that_changed_since_the_checkpoint_is_said(tmp_path: Path, capsys: Any) -> None:
    run = run_of(save=str(tmp_path / "run"))
    trained = {"index of a": "xxh3_128 1", "index of b": "xxh3_128 2", "pair id of a": "3"}
    save_checkpoint(run.config, run.engine, AT, run.runtime, trained)
    resumed = run_of(load=str(tmp_path / "run"))
    capsys.readouterr()
    for now in (trained, {}, {"index of c": "xxh3_128 5"}):
        load_checkpoint(resumed.config, resumed.engine, resumed.runtime, now)
        assert "files of the data" not in capsys.readouterr().err
    changed = {**trained, "index of b": "xxh3_128 9"}
    assert load_checkpoint(resumed.config, resumed.engine, resumed.runtime, changed) == AT
    output = capsys.readouterr().err
    assert "resuming with files of the data that are not those the checkpoint was trained" in output
    assert output.endswith("index of b: xxh3_128 2 -> xxh3_128 9\n")


def test_finetuning_takes_the_weights_and_starts_over(folder: str, capsys: Any) -> None:
    first, second = run_of(load=folder), run_of(load=folder, finetune=True, lr=0.5)
    first.load()
    fresh = second.generators()
    assert second.load() == Progress()
    assert equal(first.weights(), second.weights())
    assert same_generators(second.generators(), fresh)
    assert second.engine.optimizer.scalars()["steps"] == 0
    assert "other flags" not in capsys.readouterr().err


def test_finetuning_may_change_the_length_of_samples_of_a_rotary_model(tmp_path: Path) -> None:
    flags = {"position_embedding_type": "rope"}
    run_of(save=str(tmp_path), **flags).save()
    longer = run_of(load=str(tmp_path), finetune=True, seq_length=32, **flags)
    assert longer.load() == Progress()
    with pytest.raises(CheckpointError, match="of another model"):
        run_of(load=str(tmp_path), finetune=True, hidden_size=32, seq_length=32, **flags).load()


def test_without_the_optimizer_its_state_is_fresh(folder: str) -> None:
    run = run_of(load=folder, load_optim=False)
    assert run.load() == AT
    assert run.engine.optimizer.scalars()["steps"] == 0
    for tensors in run.engine.optimizer.named_state().values():
        assert not tensors["exp_avg"].any()


def test_without_the_generators_they_stay_as_seeded(folder: str, capsys: Any) -> None:
    run = run_of(load=folder, load_rng=False)
    seeded = run.generators()
    assert run.load() == AT
    assert same_generators(run.generators(), seeded)
    assert "random states" not in capsys.readouterr().out


def test_states_that_were_not_saved_are_missed_only_if_wanted(tmp_path: Path, capsys: Any) -> None:
    run_of(save=str(tmp_path), save_optim=False, save_rng=False).save()
    with pytest.raises(CheckpointError, match="optimizer"):
        run_of(load=str(tmp_path)).load()
    assert run_of(load=str(tmp_path), load_optim=False).load() == AT
    output = capsys.readouterr().out
    assert "the checkpoint was saved without random states; a program's own code" in output


def test_another_layout_seeds_anew_and_says_so(
    folder: str, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = rng.why_not_restorable
    two = Topology(tp=1, pp=1, dp=2)
    monkeypatch.setattr(rng, "why_not_restorable", lambda manifest, _: real(manifest, two))
    states = []
    for _ in range(2):
        run = run_of(load=folder)
        torch.rand(1)
        before = run.generators()
        assert run.load() == AT
        states.append(run.generators())
        assert not same_generators(states[-1], before)
    assert same_generators(*states), "from the seed and the iteration alone"
    output = capsys.readouterr().out
    assert "random states were saved at tp=1 pp=1 dp=1, this is tp=1 pp=1 dp=2" in output
    assert "--seed and iteration 3" in output


def saved_as_megatron(tmp_path: Path, **flags: Any) -> Run:
    """A run that has taken two steps and saved them in Megatron's files."""
    run = run_of(save=str(tmp_path / "theirs"), checkpoint_format="megatron", **flags)
    run.step()
    run.step()
    run.save()
    return run


def test_files_of_megatron_bring_back_weights_state_and_progress(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = saved_as_megatron(tmp_path)
    second = run_of(load=first.config.checkpoint.save)
    progress = second.load()
    assert (progress.iteration, progress.consumed_samples) == (3, 24)
    assert equal(second.weights(), first.weights())
    told = capsys.readouterr()
    assert "is a checkpoint of format megatron" in told.out
    assert "random states" not in told.err
    assert second.step().loss == first.step().loss != 0
    third = run_of(load=first.config.checkpoint.save, finetune=True, load_fallback="previous")
    assert third.load() == Progress()
    assert capsys.readouterr().err == ""


def test_from_damaged_files_of_megatron_a_run_goes_back_to_the_ones_before(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = saved_as_megatron(tmp_path)
    weights, folder = first.weights(), Path(first.config.checkpoint.save or "")
    first.step()
    first.save(at=4)
    (path,) = folder.glob("iter_0000004/mp_rank_00/model_optim_rng.pt")
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"iter_0000004/mp_rank_00/model_optim_rng\.pt: exp"):
        run_of(load=str(folder)).load()
    second = run_of(load=str(folder), load_fallback="previous")
    assert second.load().iteration == 3
    assert equal(second.weights(), weights)
    assert "going on from iteration 3 in" in capsys.readouterr().err
    # Of one checkpoint's own folder there is none before.
    with pytest.raises(CheckpointError, match="the checkpoint is damaged"):
        run_of(load=str(folder / "iter_0000004"), load_fallback="previous").load()


def test_of_megatrons_files_the_older_ones_go_and_others_are_left(tmp_path: Path) -> None:
    run = saved_as_megatron(tmp_path, keep_last=2)
    folder = Path(run.config.checkpoint.save or "")
    reference = save_megatron(folder, whole_model(Shape()), Shape(), iteration=1)
    for at in (4, 5, 6):
        run.save(at=at)
    assert iterations(folder) == [1, 5, 6], "nobody vouches for the first"
    assert reference.is_dir()
    (folder / "iter_0000005" / "mp_rank_00" / "a note").touch()
    for at in (7, 8):
        run.save(at=at)
    assert iterations(folder) == [1, 5, 7, 8]


def test_a_foreign_checkpoint_of_another_model_is_refused_by_its_flags(tmp_path: Path) -> None:
    first = saved_as_megatron(tmp_path)
    load = first.config.checkpoint.save
    with pytest.raises(CheckpointError, match="another model than the flags describe") as error:
        run_of(load=load, num_attention_heads=8).load()
    assert "--num-attention-heads 4 in the checkpoint, 8 here" in str(error.value.found)
    with pytest.raises(CheckpointError, match="another model than the flags describe") as error:
        run_of(load=load, seq_length=8, max_position_embeddings=16).load()
    assert "--seq-length 16 in the checkpoint, 8 here" in str(error.value.found)
    with pytest.raises(CheckpointError, match="another model or optimizer") as error:
        run_of(load=load, optimizer="sgd").load()
    assert "missing: optimizer/momentum_buffer/embedding.word.weight" in str(error.value.found)


def test_files_that_do_not_name_their_model_are_held_to_names_and_shapes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = saved_as_megatron(tmp_path)
    load = first.config.checkpoint.save or ""
    (path,) = Path(load).glob("iter_*/mp_rank_00/model_optim_rng.pt")
    content = torch.load(path, weights_only=False)
    del content["args"]
    torch.save(content, path)
    (path.parents[1] / "megatron.json").unlink()  # as if Megatron had written it
    second = run_of(load=load, finetune=True)
    second.load()
    assert equal(second.weights(), first.weights())
    assert "does not record its model's flags" in capsys.readouterr().err
    with pytest.raises(CheckpointError, match="does not record how many samples"):
        run_of(load=load).load()


def test_weights_of_another_precision_are_taken_to_begin_with(tmp_path: Path) -> None:
    first = saved_as_megatron(tmp_path)
    load = first.config.checkpoint.save
    begun = run_of(load=load, finetune=True, bf16=True)
    begun.load()
    expected = [weight.bfloat16() for weight in first.weights()]
    assert equal(begun.weights(), expected)
    with pytest.raises(CheckpointError, match="another model or optimizer"):
        run_of(load=load, bf16=True).load()


def test_parts_of_a_foreign_checkpoint_are_loaded_by_pattern(tmp_path: Path) -> None:
    first = saved_as_megatron(tmp_path)
    load = first.config.checkpoint.save
    part = run_of(load=load, finetune=True, load_only=("layers.1.*",))
    before = part.weights()
    part.load()
    names = [name for name, _ in part.engine.stage.named_parameters()]
    for name, old, new, reference in zip(names, before, part.weights(), first.weights()):
        assert torch.equal(new, reference if name.startswith("layers.1.") else old), name


def test_only_deepspeeds_engine_saves_in_its_layout(tmp_path: Path) -> None:
    run = run_of(save=str(tmp_path), checkpoint_format="deepspeed")
    assert run.engine.live() is None
    with pytest.raises(ConfigError, match="only the DeepSpeed engine saves"):
        run.save()


def test_a_run_makes_the_memory_of_its_saves_before_the_first_one(tmp_path: Path) -> None:
    run = run_of(save=str(tmp_path / "run"), async_save=True)
    run.step()
    with BackgroundSaves(run.runtime.context) as saves:
        reserve_for_saves(run.config, run.engine, saves)
        saves.wait_for_memory()
        made = saves._memory._bytes
        save_checkpoint(run.config, run.engine, AT, run.runtime, saves=saves)
        assert saves._memory._bytes is made
        saves.wait()
    assert iterations(tmp_path / "run") == [3]
    state = run.engine.state(optimizer=True).tensors
    assert made.numel() >= sum(part.view.nbytes for one in state for part in one.parts)


def test_a_run_whose_saves_wait_or_that_saves_nowhere_makes_no_memory(tmp_path: Path) -> None:
    for flags in ({"save": str(tmp_path)}, {}):
        run = run_of(**flags)
        with BackgroundSaves(run.runtime.context) as saves:
            reserve_for_saves(run.config, run.engine, saves)
            saves.wait_for_memory()
            assert saves._memory._bytes.numel() == 0


def towers_of(run: Run) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in run.engine.stage.named_parameters()}


@pytest.mark.parametrize("is_shared", [False, True])
def test_each_tower_of_a_retriever_begins_with_a_bert(tmp_path: Path, is_shared: bool) -> None:
    bert = run_of(bert_task(), save=str(tmp_path), fp64=True)
    bert.save()
    flags: dict[str, Any] = {
        "bert_load": str(tmp_path),
        "biencoder_projection_dim": 4,
        "biencoder_shared_query_context_model": is_shared,
    }
    task = ict_task(tiny_run("nowhere", **flags))
    run = run_of(task, **flags)
    before = towers_of(run)
    assert run.load() == Progress()
    after, weights = towers_of(run), towers_of(bert)
    for name, value in after.items():
        tower, _, inner = name.partition(".")
        assert tower in run.config.retrieval.towers
        expected = before[name] if inner.startswith("head.") else weights[inner]
        assert torch.equal(value, expected), name


def test_the_towers_of_a_retriever_begin_with_no_gpt(folder: str) -> None:
    run = run_of(ict_task(tiny_run("nowhere")), bert_load=folder)
    before = run.weights()
    with pytest.raises(CheckpointError, match="another kind of model than this run takes"):
        run.load()
    assert equal(run.weights(), before)


def test_a_bert_of_another_shape_is_refused_for_a_tower(tmp_path: Path) -> None:
    run_of(bert_task(), save=str(tmp_path), num_layers=1).save()
    run = run_of(ict_task(tiny_run("nowhere")), bert_load=str(tmp_path))
    with pytest.raises(CheckpointError, match="of another model than the flags describe"):
        run.load()
