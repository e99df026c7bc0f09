"""The main of a pretraining program: what is trained, and the errors of wrong flags."""

from pathlib import Path
from typing import Any

import pytest

import finetune_t0_non_causal_decoder
import megatron.initialize
import megatron.training
import pretrain_prefix_lm
import pretrain_vit
from megatron.arguments import CommandLineError
from megatron.command import pretrain_from_flags
from megatron.config.run import RunConfig
from megatron.data.kinds.program_data import PAIRS_DATA, PREFIX_DATA
from megatron.engine.base import PretrainTask
from megatron.errors import PreflightError
from pretrain_bert import bert_task
from tests.unit.config.groups import COMMAND

TOKENIZER = "BertWordPieceLowerCase"


def run_with(monkeypatch: pytest.MonkeyPatch, *words: str) -> list[RunConfig]:
    """Start the program on a command line; with which flags the task was asked for."""
    asked: list[RunConfig] = []

    def task_of(config: RunConfig) -> PretrainTask:
        asked.append(config)
        return bert_task(order_head=config.data.bert_binary_head)

    monkeypatch.setattr("sys.argv", ["pretrain_bert.py", *words])
    pretrain_from_flags(task_of, tokenizer_type=TOKENIZER)
    return asked


def test_the_flags_decide_the_task_and_both_are_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    monkeypatch.setattr(megatron.training, "pretrain", lambda *args: given.append(args))
    at = COMMAND.index("--tokenizer-type")
    words = [*COMMAND[:at], *COMMAND[at + 2 :], "--bert-no-binary-head"]
    (config,) = run_with(monkeypatch, *words)
    assert config.tokenizer.tokenizer_type == TOKENIZER
    ((task, trained),) = given
    assert trained is config
    assert task.losses == ("lm loss",)


def test_mistakes_are_said_with_what_the_checks_of_this_program_find(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(PreflightError, match="num-layerz") as raised:
        run_with(monkeypatch, *COMMAND, "--num-layerz", "2")
    message = str(raised.value)
    assert "corpus.idx" in message, "a file is missing too"
    assert "the tokenizer lacks tokens that masking needs" in message, "a BERT's data, not a GPT's"


def test_a_program_may_have_defaults_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    monkeypatch.setattr(megatron.training, "pretrain", lambda *args: given.append(args))
    monkeypatch.setattr("sys.argv", ["finetune_t0_non_causal_decoder.py", *COMMAND])
    finetune_t0_non_causal_decoder.main()
    ((task, config),) = given
    assert config.data.mtf
    assert (task.name, task.reads) == ("prefix_lm", PAIRS_DATA)
    monkeypatch.setattr("sys.argv", ["pretrain_prefix_lm.py", *COMMAND])
    pretrain_prefix_lm.main()
    task, config = given[-1]
    assert not config.data.mtf
    assert (task.name, task.reads) == ("prefix_lm", PREFIX_DATA)


def test_a_program_may_read_flags_in_its_own_way(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    given: list[Any] = []
    monkeypatch.setattr(megatron.training, "pretrain", lambda *args: given.append(args))
    words = "--num-layers 2 --hidden-size 8 --num-attention-heads 2 --micro-batch-size 2 --lr 1"
    flags = ["--train-iters", "1", "--img-dim", "32", "--data-path", str(tmp_path)]
    monkeypatch.setattr("sys.argv", ["pretrain_vit.py", *words.split(), *flags])
    pretrain_vit.main()
    ((task, config),) = given
    assert (task.name, config.data.seq_length) == ("vit", 5)
    assert config.tokenizer.tokenizer_type == "NullTokenizer"


def test_flags_that_cannot_be_read_are_said_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    at = COMMAND.index("--num-layers")
    with pytest.raises(CommandLineError, match="num-layers"):
        run_with(monkeypatch, *COMMAND[:at], *COMMAND[at + 2 :])
