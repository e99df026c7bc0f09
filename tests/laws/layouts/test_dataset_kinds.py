"""The laws for data that are no plain windows: rows of dialogues and pairs, and filled middles.

A row of dialogues gives the loss of its dialogues one by one; layouts read one order; a resumed
run is the uninterrupted one, to the bit.
"""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.config.data import DataConfig
from megatron.config.run import RunConfig
from megatron.data.data_utils import IndexPlace, build_datasets
from megatron.data.kinds.dataset_makers import gpt_maker
from megatron.data.loading.gpt_batch import decoder_batch
from megatron.model.losses import LossSum
from tests.laws.checkpoints.test_resume import FULL, HALF, check_joined
from tests.support.models import tiny_build, tiny_config, tiny_model
from tests.support.ranks import run_on_ranks
from tests.support.tiny import (
    FP64,
    Record,
    assert_close,
    tiny_run,
    train_all,
    write_tiny_corpus,
)
from tests.unit.data.dialogues import as_pairs, random_dialogues, write_dialogues, write_pairs

MARKS = {"fim_prefix_token": "47", "fim_suffix_token": "48", "fim_middle_token": "49"}
KINDS: dict[str, dict[str, Any]] = {
    "sft": {"sft": True},
    "mtf": {"mtf": True, "position_embedding_type": "rope"},
    "fim": {"fim_data": True, "fim_rate": 0.8, **MARKS},
}


def run_of(kind: str, folder: Path, **flags: Any) -> RunConfig:
    """A tiny run over a corpus of its kind."""
    folder.mkdir(exist_ok=True)
    dialogues = random_dialogues(160)
    if kind == "sft":
        corpus = write_dialogues(folder / "chats", dialogues)
    elif kind == "mtf":
        corpus = write_pairs(folder / "pairs", as_pairs(dialogues))
    else:
        corpus = write_tiny_corpus(folder)
    return tiny_run(corpus, **KINDS[kind], **flags)


@pytest.mark.parametrize("kind", ["sft", "mtf"])
@pytest.mark.parametrize("positions", ["rope", "alibi", "learned_absolute"])
def test_a_row_has_the_loss_of_its_documents_one_by_one(
    tmp_path: Path, kind: str, positions: str
) -> None:
    dialogues = random_dialogues(40)
    folder = tmp_path / "c"
    prefix = (
        write_dialogues(folder, dialogues)
        if kind == "sft"
        else write_pairs(folder, as_pairs(dialogues))
    )
    data = DataConfig(seq_length=12, data_path=(prefix,), split="1", **{kind: True})
    maker = gpt_maker(data, tokenizer=_NoTokens(), seed=3, is_builder=True)
    place = IndexPlace(cache_path=str(tmp_path / "cache"))
    rows = build_datasets(maker, data, num_samples=(10, 0, 0), place=place).train
    assert rows is not None
    model = tiny_model(tiny_config(position_embedding_type=positions), tiny_build())
    several = 0
    for i in range(10):
        row = {key: torch.from_numpy(array)[None] for key, array in rows[i].items()}
        cut = decoder_batch(row, data, eod=None)
        packed = model(*cut[:1], cut.position_ids, cut.document_ids, cut.labels, cut.loss_mask)
        assert isinstance(packed, LossSum)
        segments = row["segment_ids"][0]
        total, count = 0.0, 0.0
        for segment in range(1, int(segments.max()) + 1):
            here = segments == segment
            text, learned = row["text"][:, here], row["is_input"][:, here] == 0
            if text.shape[1] < 2:
                continue
            alone = model(
                text[:, :-1], labels=text[:, 1:], loss_mask=learned[:, 1:].to(torch.float32)
            )
            assert isinstance(alone, LossSum)
            total += alone.total.item()
            count += alone.count.item()
        assert packed.count.item() == count
        assert_close([packed.total.item()], [total], FP64)
        several += int(segments.max()) > 1
    assert several > 5, "rows are meant to hold several documents"


class _NoTokens:
    """A tokenizer without special tokens; rows are padded with 0."""

    vocab_size, extra_ids = 51, ()
    eod = bos = cls = sep = mask = pad = None

    def piece(self, token_id: int) -> str:
        """One id as a vocabulary would spell it."""
        return str(token_id)


@pytest.mark.parametrize("kind", KINDS)
def test_replicas_read_one_order_and_learn_alike(tmp_path: Path, kind: str) -> None:
    configs = [run_of(kind, tmp_path, dataloader_type=order) for order in ("single", "cyclic")]
    one = run_on_ranks(1, train_all, configs)[0]
    for world_size in (2, 4):
        by_rank = run_on_ranks(world_size, train_all, configs)
        for at, alone in enumerate(one):
            records: list[Record] = [records[at] for records in by_rank]
            steps = zip(*(record.trained_on for record in records), strict=True)
            assert [batch for step in steps for batch in step] == alone.trained_on
            assert_close(records[0].losses, alone.losses, FP64)
            assert_close(records[0].grad_norms, alone.grad_norms, FP64)


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_of_each_kind_is_the_uninterrupted_run(tmp_path: Path, kind: str) -> None:
    flags = {"fp64": False, "train_iters": FULL, "eval_iters": 1, "eval_interval": 3}
    dropout = {"hidden_dropout": 0.1, "attention_dropout": 0.1, "num_workers": 2}
    plain = run_of(kind, tmp_path, split="60,20,20", **flags, **dropout)
    folder = str(tmp_path / "checkpoints")
    checkpoint = dataclasses.replace(plain.checkpoint, save=folder, load=folder)
    stopping = dataclasses.replace(plain.training, exit_interval=HALF)
    saving = dataclasses.replace(plain, checkpoint=checkpoint, training=stopping)
    loading = dataclasses.replace(plain, checkpoint=checkpoint)
    straight, first = run_on_ranks(1, train_all, [plain, saving])[0]
    (second,) = run_on_ranks(1, train_all, [loading])[0]
    check_joined(straight, first, second, kind)
