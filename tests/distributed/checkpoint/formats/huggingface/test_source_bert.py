"""BERTs of Hugging Face at any layout: pretrained further from a folder, fine-tuned, made again."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from megatron.checkpoint.formats import registry
from megatron.checkpoint.formats.huggingface.source import HuggingFaceSource
from megatron.checkpoint.formats.huggingface.writer import write_huggingface
from megatron.checkpoint.source import SourceOptions, WriteOptions
from megatron.config.run import RunConfig
from tests.support.checkpoints.bert_runs import (
    Continued,
    fine_tune,
    train_and_keep,
    train_or_error,
)
from tests.support.checkpoints.hf_bert import SAME, hf_bert, save_bert
from tests.support.ranks import run_on_ranks
from tests.support.tiny_bert import TinySentences, tiny_bert_run, write_tiny_sentences
from tools.compare_with_transformers import check_export

LAYOUTS: dict[str, dict[str, Any]] = {
    "one process": {},
    "tp 2": {"tensor_model_parallel_size": 2},
    "pp 2": {"pipeline_model_parallel_size": 2},
    "tp 2, sequence parallel, pp 2": {
        "tensor_model_parallel_size": 2,
        "pipeline_model_parallel_size": 2,
        "sequence_parallel": True,
    },
}
TRAINED = ["bert", "bert, masked words", "bert, untied, tanh", "megatron"]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> TinySentences:
    return write_tiny_sentences(Path(tmp_path_factory.mktemp("sentences")))


def world_of(layout: str) -> int:
    sizes = (
        LAYOUTS[layout].get(f"{kind}_model_parallel_size", 1) for kind in ("tensor", "pipeline")
    )
    return next(sizes) * next(sizes)


def run_of(folder: Path, corpus: TinySentences, **flags: Any) -> RunConfig:
    """Two steps from a folder, with the flags that its config gives."""
    with HuggingFaceSource(folder, SourceOptions()) as source:
        model = {name: v for name, v in source.config["model"].items() if "dropout" not in name}
        binary = source.config["data"]["bert_binary_head"]
    values = {"bert_binary_head": binary, "fp64": False, "finetune": True, "train_iters": 2}
    values |= {"micro_batch_size": 4}
    return tiny_bert_run(corpus, **{**model, **values, "load": str(folder), **flags})


def expected_losses(case: str, run: Continued, microbatches: int) -> list[float]:
    """What `transformers` makes of the rows of the first step: of words, and of the order."""
    raw = {
        name: torch.cat([batch[name] for batch in run.batches[:microbatches]])
        for name in run.batches[0]
    }
    with torch.no_grad():
        found = hf_bert(case)(
            raw["text"], attention_mask=raw["padding_mask"], token_type_ids=raw["types"]
        )
    guessed = raw["loss_mask"].bool()
    words = found.logits if "logits" in found else found.prediction_logits
    losses = [float(F.cross_entropy(words[guessed], raw["labels"][guessed]))]
    if "seq_relationship_logits" in found:
        order = F.cross_entropy(found.seq_relationship_logits, raw["is_random"].view(-1))
        losses.append(float(order))
    return losses


@pytest.mark.parametrize(
    "layout",
    # The last layout has what these two have.
    [
        pytest.param(one, marks=[pytest.mark.wide] if one in ("tp 2", "pp 2") else [])
        for one in LAYOUTS
    ],
)
def test_a_bert_trains_on_from_a_folder_and_goes_back(
    layout: str, corpus: TinySentences, tmp_path: Path
) -> None:
    folders = {case: save_bert(case, tmp_path / f"hf {i}") for i, case in enumerate(TRAINED)}
    runs = [
        run_of(folder, corpus, save=str(tmp_path / f"ours {i}"), **LAYOUTS[layout])
        for i, folder in enumerate(folders.values())
    ]
    records = run_on_ranks(world_of(layout), train_and_keep, runs)[0]
    for i, (case, record) in enumerate(zip(folders, records)):
        microbatches = runs[i].training.global_batch_size // runs[i].training.micro_batch_size
        wanted = expected_losses(case, record, microbatches)
        assert record.losses[0] == pytest.approx(wanted, abs=SAME), case
        assert record.losses[1] != record.losses[0]
        with registry.open_source(tmp_path / f"ours {i}") as source:
            assert source.kind == "bert"
            made = write_huggingface(source, tmp_path / f"made {i}", WriteOptions())
            found = check_export(source, made)
        assert found is not None
        assert found.worst.apart <= SAME, case


def test_a_folder_without_the_heads_of_a_run_says_how_it_can_be_loaded(
    corpus: TinySentences, tmp_path: Path
) -> None:
    words = save_bert("bert, masked words", tmp_path / "words")
    bare = save_bert("bert, bare", tmp_path / "bare")
    missing = ("order_head.*", "lm_head.*", "output_bias.*")
    runs = [
        run_of(words, corpus, bert_binary_head=True),
        run_of(bare, corpus, bert_binary_head=True),
        run_of(bare, corpus, bert_binary_head=True, load_except=missing),
    ]
    (messages,) = run_on_ranks(1, train_or_error, runs)
    assert "fix: add --bert-no-binary-head, or begin with random values" in messages[0]
    assert "--load-except 'order_head.*' 'lm_head.*' 'output_bias.*'" in messages[1]
    assert messages[2] == ""


SHAPE = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 4 --ffn-hidden-size 40 --seq-length 24 "
    "--max-position-embeddings 24 --layernorm-epsilon 1e-12 --onnx-safe "
    "--apply-residual-connection-post-layernorm"
)
RUN = (
    "--make-vocab-size-divisible-by 4 --micro-batch-size 4 --global-batch-size 8 --lr 0.01 "
    "--epochs 1 --device cpu --num-workers 0 --seed 3"
)


def words_of(folder: Path, corpus: TinySentences, tmp_path: Path, shape: str) -> list[str]:
    """RTE with a folder to begin with, on files that are made here."""
    random = np.random.RandomState(0)
    for name in ("train", "valid"):
        lines = ["index\tsentence1\tsentence2\tlabel"]
        for at in range(24):
            label, last = (("entailment", "w9"), ("not_entailment", "w12"))[at % 2]
            first, second = random.choice(range(0, 48, 3), 2)
            lines.append(f"{at}\tw{first} w6\tw{second} {last}\t{label}")
        (tmp_path / f"{name}.tsv").write_text("\n".join(lines) + "\n")
    files = [
        "--train-data",
        str(tmp_path / "train.tsv"),
        "--valid-data",
        str(tmp_path / "valid.tsv"),
    ]
    given = ["--task", "RTE", "--pretrained-checkpoint", str(folder), *files]
    return [*given, "--vocab-file", corpus.vocab_file, *shape.split(), *RUN.split()]


def test_fine_tuning_begins_with_a_folder_and_its_result_is_one_again(
    corpus: TinySentences, tmp_path: Path
) -> None:
    folder = save_bert("bert", tmp_path / "hf")
    words = words_of(folder, corpus, tmp_path, SHAPE)
    result = tmp_path / "told.json"
    save = ["--save", str(tmp_path / "tuned"), "--output", str(result)]
    assert run_on_ranks(2, fine_tune, [*words, *save]) == ["", ""]
    assert json.loads(result.read_text())["examples"] == 24
    with registry.open_source(tmp_path / "tuned") as source:
        assert source.kind == "classifier"
        made = write_huggingface(source, tmp_path / "made", WriteOptions())
        found = check_export(source, made)
    assert found is not None
    assert "class scores" in found.outputs
    config = json.loads((made / "config.json").read_text())
    assert config["architectures"] == ["BertForSequenceClassification"]
    assert len(config["id2label"]) == 2
    # The classifier there judges as the one that it was made from.
    again = tmp_path / "again.json"
    from_folder = ["--pretrained-checkpoint", str(folder)]
    at = words.index(from_folder[0])
    judging = [*words[:at], "--load", str(made), *words[at + 2 :], "--output", str(again)]
    judging[judging.index("--epochs") + 1] = "0"
    assert run_on_ranks(1, fine_tune, judging) == [""]
    first, second = (json.loads(path.read_text()) for path in (result, again))
    assert first["accuracy"] == second["accuracy"]


def test_fine_tuning_says_what_does_not_fit_a_folder(corpus: TinySentences, tmp_path: Path) -> None:
    folder = save_bert("bert", tmp_path / "hf")
    other = SHAPE.replace("--apply-residual-connection-post-layernorm", "")
    (messages,) = run_on_ranks(1, fine_tune, words_of(folder, corpus, tmp_path, other))
    assert "of another model than the flags describe" in messages
    assert (
        "--apply-residual-connection-post-layernorm True in the checkpoint, False here" in messages
    )
    words_alone = save_bert("bert, masked words", tmp_path / "words")
    shape = SHAPE.replace("1e-12", "1e-3")
    (messages,) = run_on_ranks(1, fine_tune, words_of(words_alone, corpus, tmp_path, shape))
    assert "it has no pooler, which the run has" in messages
    assert "--load-except 'pooler.*'" in messages
    random = [*words_of(words_alone, corpus, tmp_path, shape), "--load-except", "pooler.*"]
    assert run_on_ranks(1, fine_tune, random) == [""]
