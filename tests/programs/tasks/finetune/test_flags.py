"""The flags of fine-tuning: scripts for other Megatrons run, or are refused with the reason."""

import json
from pathlib import Path

import pytest

from megatron.errors import ConfigError, PreflightError
from tasks.finetune.flags import NO_EFFECT, REFUSED, Flags, read_flags

# As in Megatron-LM's examples/finetune_mnli_distributed.sh, in the spelling of its last version.
MNLI = (
    "--seed 1234 --train-data a/train.tsv --valid-data a/matched.tsv a/mismatched.tsv "
    "--tokenizer-type BertWordPieceLowerCase --vocab-file v.txt --epochs 5 "
    "--pretrained-checkpoint p --tensor-model-parallel-size 1 --num-layers 24 --hidden-size 1024 "
    "--num-attention-heads 16 --micro-batch-size 8 --activations-checkpoint-method uniform "
    "--lr 5.0e-5 --lr-decay-style linear --lr-warmup-fraction 0.065 --seq-length 512 "
    "--max-position-embeddings 512 --save-interval 500000 --save c --log-interval 10 "
    "--eval-interval 100 --eval-iters 50 --weight-decay 1.0e-1 --fp16"
)
RACE = (
    "--seed 1234 --train-data R/train/middle R/train/high --valid-data R/dev/middle R/dev/high "
    "--vocab-file v.txt --epochs 3 --pretrained-checkpoint p --num-layers 24 --hidden-size 1024 "
    "--num-attention-heads 16 --micro-batch-size 4 --checkpoint-activations --lr 1.0e-5 "
    "--lr-decay-style linear --lr-warmup-fraction 0.06 --seq-length 512 "
    "--max-position-embeddings 512 --save-interval 100000 --save c --log-interval 10 "
    "--eval-interval 100 --eval-iters 50 --weight-decay 1.0e-1 --clip-grad 1.0 "
    "--hidden-dropout 0.1 --attention-dropout 0.1 --fp16"
)


def read(name: str, script: str, *more: str) -> Flags:
    return read_flags(name, [*script.split(), *more])


def test_the_scripts_of_megatron_are_understood(capsys: pytest.CaptureFixture[str]) -> None:
    own, config = read("MNLI", MNLI)
    assert own.valid_data == ["a/matched.tsv", "a/mismatched.tsv"]
    assert (own.epochs, config.checkpoint.pretrained_checkpoint) == (5, "p")
    assert config.training.activations.method is not None
    assert (config.schedule.lr_warmup_fraction, config.optimizer.weight_decay) == (0.065, 0.1)
    output = capsys.readouterr().out
    assert "--eval-interval has no effect here" in output
    assert "--eval-iters has no effect here" in output
    own, config = read("RACE", RACE)
    assert own.train_data == ["R/train/middle", "R/train/high"]
    assert config.tokenizer.tokenizer_type == "BertWordPieceLowerCase"


def test_older_spellings_are_named_with_their_successors() -> None:
    old = ["--batch-size", "8", "--model-parallel-size", "1", "--warmup", "0.065"]
    with pytest.raises(PreflightError) as raised:
        read("MNLI", MNLI, *old)
    for successor in (
        "--micro-batch-size",
        "--tensor-model-parallel-size",
        "--lr-warmup-fraction",
    ):
        assert f"use {successor}" in str(raised.value)


def test_keep_last_is_megatrons_alone_and_ours_with_a_number(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert read("MNLI", MNLI, "--keep-last").config.checkpoint.keep_last is None
    assert "the last batch of an epoch is never left out" in capsys.readouterr().out
    assert read("MNLI", f"--keep-last {MNLI}").config.checkpoint.keep_last is None
    assert read("MNLI", MNLI, "--keep-last", "2").config.checkpoint.keep_last == 2


@pytest.mark.parametrize("flag", REFUSED)
def test_what_means_nothing_here_is_refused_with_what_does(flag: str) -> None:
    with pytest.raises(PreflightError, match="means nothing for fine-tuning") as raised:
        read("MNLI", MNLI, flag)
    assert f"found: {flag}" in str(raised.value)
    assert REFUSED[flag] in str(raised.value)
    assert flag not in NO_EFFECT
    with pytest.raises(PreflightError, match="means nothing for fine-tuning"):
        read("MNLI", MNLI, f"{flag}=1")


def test_other_formats_are_not_written() -> None:
    with pytest.raises(ConfigError, match="saves in our own format alone"):
        read("MNLI", MNLI, "--checkpoint-format", "megatron")


def test_losses_of_routers_are_for_pretraining() -> None:
    experts = ("--num-experts", "4", "--moe-router-topk", "2", "--disable-bias-linear", "--swiglu")
    assert read("MNLI", MNLI, *experts).config.model.has_experts
    with pytest.raises(ConfigError, match="fine-tuning has no losses of routers"):
        read("MNLI", MNLI, *experts, "--moe-z-loss-coeff", "0.001")


def test_a_curriculum_of_deepspeeds_json_is_refused_as_one_of_flags_is(tmp_path: Path) -> None:
    block = {
        "enabled": True,
        "curriculum_type": "seqlen",
        "schedule_type": "fixed_linear",
        "min_difficulty": 64,
        "max_difficulty": 512,
        "schedule_config": {"total_curriculum_step": 8, "difficulty_step": 8},
    }
    file = tmp_path / "ds.json"
    words = ("--deepspeed", "--deepspeed_config", str(file))
    file.write_text(json.dumps({"curriculum_learning": block | {"enabled": False}}))
    assert read("MNLI", MNLI, *words).config.engine.deepspeed
    file.write_text(json.dumps({"curriculum_learning": block}))
    with pytest.raises(ConfigError, match="fine-tuning has no curriculum of lengths"):
        read("MNLI", MNLI, *words)


def test_all_that_is_wrong_is_said_at_once() -> None:
    with pytest.raises(PreflightError) as raised:
        read_flags("RTE", ["--epochs", "-1", "--train-iters", "3"])
    for problem in ("epochs are negative", "there is nothing to judge by", "--train-iters"):
        assert problem in str(raised.value)
