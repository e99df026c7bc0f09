"""Hugging Face folders at any layout: loaded into training, and made from what was trained."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from megatron.checkpoint.formats import registry
from megatron.checkpoint.formats.huggingface.source import HuggingFaceSource
from megatron.checkpoint.formats.huggingface.writer import write_huggingface
from megatron.checkpoint.source import SourceOptions, WriteOptions
from megatron.config.run import RunConfig
from tests.support.checkpoints.hf_models import CASES, LOGITS, VOCABULARY, hf_model, save_case
from tests.support.ranks import run_on_ranks
from tests.support.tiny import Record, tiny_run, train_all, write_tiny_corpus
from tools.compare_with_transformers import check_export

LAYOUTS: dict[str, dict[str, Any]] = {
    "one process": {},
    "tp 2": {"tensor_model_parallel_size": 2},
    "tp 2, sequence parallel, pp 2": {
        "tensor_model_parallel_size": 2,
        "pipeline_model_parallel_size": 2,
        "sequence_parallel": True,
    },
}
MICRO_BATCH = 4  # of two
# A multi-query model has one group, which two tp ranks cannot share.
LOADED = [case for case in CASES if case != "llama, biases, wide heads"]
# Every case is split over tensor-parallel ranks in one of the two layouts.
TURNS = (LOADED[::2], LOADED[1::2])
TP, ALL = "tp 2", "tp 2, sequence parallel, pp 2"


def world_of(layout: str) -> int:
    flags = LAYOUTS[layout]
    sizes = (flags.get(f"{kind}_model_parallel_size", 1) for kind in ("tensor", "pipeline"))
    return next(sizes) * next(sizes)


def run_of(folder: Path, corpus: str, **flags: Any) -> RunConfig:
    """Fine-tuning for two steps from a folder, with the flags that its config gives."""
    with HuggingFaceSource(folder, SourceOptions()) as source:
        model = {name: v for name, v in source.config["model"].items() if "dropout" not in name}
    return tiny_run(
        corpus,
        **model,
        fp64=False,
        true_vocab_size=VOCABULARY,
        load=str(folder),
        finetune=True,
        train_iters=2,
        micro_batch_size=MICRO_BATCH,
        **flags,
    )


def expected_loss(case: str, record: Record) -> float:
    """What `transformers` makes of the samples of the first step."""
    first_step = record.trained_on[: len(record.trained_on) // 2]
    model, samples = hf_model(case), torch.tensor(first_step).flatten(0, 1)
    with torch.no_grad():
        logits = model(samples[:, :-1]).logits
    return float(F.cross_entropy(logits.flatten(0, 1), samples[:, 1:].flatten()))


@pytest.mark.parametrize(
    ("layout", "cases"),
    [
        pytest.param("one process", LOADED, marks=pytest.mark.wide, id="one process"),
        pytest.param(TP, TURNS[0], id=TP),
        pytest.param(ALL, TURNS[1], id=ALL),
        pytest.param(TP, TURNS[1], marks=pytest.mark.wide, id=f"{TP}, the others"),
        pytest.param(ALL, TURNS[0], marks=pytest.mark.wide, id=f"{ALL}, the others"),
    ],
)
def test_every_family_trains_on_from_a_folder_and_goes_back(
    layout: str, cases: Sequence[str], tmp_path: Path
) -> None:
    corpus = write_tiny_corpus(tmp_path / "corpus")
    folders = {case: save_case(case, tmp_path / f"hf {i}") for i, case in enumerate(cases)}
    runs = [
        run_of(folder, corpus, save=str(tmp_path / f"ours {i}"), **LAYOUTS[layout])
        for i, folder in enumerate(folders.values())
    ]
    records = run_on_ranks(world_of(layout), train_all, runs)[0]
    for i, (case, record) in enumerate(zip(folders, records)):
        assert record.losses[0] == pytest.approx(expected_loss(case, record), abs=LOGITS), case
        assert record.losses[1] != record.losses[0]
        with registry.open_source(tmp_path / f"ours {i}") as source:
            made = write_huggingface(source, tmp_path / f"made {i}", WriteOptions())
            found = check_export(source, made)
        assert found is not None
        assert found.worst.apart <= LOGITS, case
