"""A run goes on from files in Megatron's layout as from our own: same losses, weights and state.

Both ways there: a job that saves them itself, and a converted checkpoint at a layout that no job
had. Where only weights are loaded, the run begins with them and logs what it did not load.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.checkpoint.formats import registry
from megatron.checkpoint.formats.native.source import write_sharded
from megatron.checkpoint.source import WriteOptions
from tests.laws.checkpoints.test_reshard import ALL, SAVED_AT, check_continued
from tests.support.ranks import run_on_ranks
from tests.support.tiny import (
    FP32,
    MODELS,
    Record,
    assert_close,
    tiny_run,
    train_all,
    whole,
    write_tiny_corpus,
)

RUNS: dict[str, dict[str, Any]] = {
    "llama, adamw": {**MODELS["llama"], "num_layers": 4},
    "bloom, sgd": {**MODELS["bloom"], "optimizer": "sgd", "num_layers": 4},
    "gpt2": {"num_layers": 4},
}
# tp, pp, dp, virtual stages of the job that saves.
SAVED = [(1, 1, 1, None), (2, 1, 2, None), (2, 2, 1, None), (1, 2, 1, 2)]

# tp, pp of two ranks that load.
LOADED = [(1, 1), (2, 1), (1, 2)]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_tiny_corpus(Path(tmp_path_factory.mktemp("corpus")))


@pytest.fixture(scope="module")
def straight_runs(corpus: str) -> list[Record]:
    """The runs that nothing interrupts, in one process."""
    return run_on_ranks(1, train_all, [_run(corpus, flags) for flags in RUNS.values()])[0]


@pytest.mark.parametrize(("tp", "pp", "dp", "chunks"), SAVED)
@pytest.mark.parametrize(
    "turn", [0, *(pytest.param(turn, marks=pytest.mark.wide) for turn in range(1, len(RUNS)))]
)
def test_a_job_goes_on_from_what_another_saved_in_megatrons_layout(
    tmp_path: Path,
    corpus: str,
    straight_runs: list[Record],
    tp: int,
    pp: int,
    dp: int,
    chunks: int | None,
    turn: int,
) -> None:
    """Every layout is loaded at every other, one model in turn; all turns are all models."""
    turn += SAVED.index((tp, pp, dp, chunks))
    saving = [
        _run(
            corpus,
            flags,
            exit_interval=SAVED_AT,
            tensor_model_parallel_size=tp,
            pipeline_model_parallel_size=pp,
            num_virtual_stages_per_pipeline_rank=chunks,
            save=str(tmp_path / str(at)),
            checkpoint_format="megatron",
        )
        for at, flags in enumerate(RUNS.values())
    ]
    run_on_ranks(tp * pp * dp, train_all, saving)
    models = [(turn + step) % len(RUNS) for step in range(len(LOADED))]
    loading = [
        _run(
            corpus,
            [*RUNS.values()][at],
            tensor_model_parallel_size=other_tp,
            pipeline_model_parallel_size=other_pp,
            use_distributed_optimizer=True,
            load=str(tmp_path / str(at)),
        )
        for at, (other_tp, other_pp) in zip(models, LOADED)
    ]
    for at, *records in zip(models, *run_on_ranks(2, train_all, loading)):
        check_continued(records, straight_runs[at])


def test_a_checkpoint_goes_there_and_back_through_megatrons_layout(tmp_path: Path) -> None:
    corpus = write_tiny_corpus(tmp_path / "corpus")
    flags = RUNS["llama, adamw"]
    straight = run_on_ranks(1, train_all, [_run(corpus, flags)])[0][0]
    ours = tmp_path / "ours"
    run_on_ranks(1, train_all, [_run(corpus, flags, exit_interval=SAVED_AT, save=str(ours))])
    back = tmp_path / "back"
    with registry.open_source(ours) as source:
        options = WriteOptions(tensor_model_parallel_size=4, pipeline_model_parallel_size=2)
        registry.get("megatron").write(source, tmp_path / "megatron", options)
    with registry.open_source(tmp_path / "megatron") as source:
        write_sharded(source, back)
    for folder in (tmp_path / "megatron", back):
        records = run_on_ranks(1, train_all, [_run(corpus, flags, load=str(folder))])[0]
        check_continued(records, straight)


def test_half_precision_keeps_its_masters_and_its_loss_scale(tmp_path: Path) -> None:
    corpus = write_tiny_corpus(tmp_path / "corpus")
    flags = {"bf16": True, "num_layers": 2}
    straight = run_on_ranks(1, train_all, [_run(corpus, flags)])[0][0]
    save = str(tmp_path / "save")
    first = _run(corpus, flags, exit_interval=SAVED_AT, save=save, checkpoint_format="megatron")
    run_on_ranks(1, train_all, [first])
    (found,) = run_on_ranks(1, train_all, [_run(corpus, flags, load=save)])[0]
    assert_close(found.losses, straight.losses[SAVED_AT:], FP32)
    for name, tensor in whole([found]).items():
        assert torch.equal(tensor, whole([straight])[name]), name


def test_a_run_begins_with_the_weights_alone(tmp_path: Path) -> None:
    corpus = write_tiny_corpus(tmp_path / "corpus")
    flags = RUNS["gpt2"]
    save = str(tmp_path / "save")
    first = _run(corpus, flags, exit_interval=SAVED_AT, save=save, save_optim=False)
    run_on_ranks(1, train_all, [first])
    with registry.open_source(save) as source:
        registry.get("megatron").write(source, tmp_path / "release", WriteOptions(iteration=0))
    assert (tmp_path / "release" / "release").is_dir()
    load = str(tmp_path / "release")
    expected = run_on_ranks(1, train_all, [_run(corpus, flags, load=save, finetune=True)])[0]
    found = run_on_ranks(2, train_all, [_run(corpus, flags, load=load, finetune=True)])[0]
    _check_equal_start(found, expected)
    refused = run_on_ranks(1, _refusal_of, [_run(corpus, flags, load=load)])[0]
    assert "weights alone, and the run is to go on with its optimizer" in refused


def _refusal_of(configs: list[Any]) -> str:
    try:
        train_all(configs)
    except Exception as error:
        return str(error)
    return "nothing was refused"


def _check_equal_start(found: list[Record], expected: list[Record]) -> None:
    assert found[0].progress == expected[0].progress
    assert_close(found[0].losses, expected[0].losses, FP32)


def _run(corpus: str, flags: dict[str, Any], **more: Any) -> Any:
    return tiny_run(corpus, **{"micro_batch_size": 2, **flags, "train_iters": ALL, **more})
