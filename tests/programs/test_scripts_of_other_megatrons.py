"""Example scripts of other Megatrons, shrunken to what two ranks of a CPU train: the loss falls."""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.architecture.source_tree import ROOT
from tests.programs.tasks.finetune.runs import prepare, write_task
from tests.support.example_scripts import SYSTEMS
from tests.support.example_scripts.script import Script
from tests.support.launch import all_ended, byte_corpus, each_rank
from tests.support.tiny_bert import write_tiny_sentences

pytestmark = pytest.mark.slow

SCRIPTS: Mapping[str, Script] = {
    script.path: script for scripts in SYSTEMS.values() for script in scripts
}
# Where files lie, how long the run is, and what needs a GPU; everything else stays.
LEFT_OUT = {
    *("--data-path", "--vocab-file", "--merge-file", "--tokenizer-type", "--tokenizer-model"),
    *("--vocab-size", "--mock-data", "--data-cache-path", "--load", "--save", "--tensorboard-dir"),
    *("--save-interval", "--train-samples", "--train-tokens", "--lr-decay-samples"),
    *("--lr-decay-tokens", "--lr-decay-iters", "--lr-warmup-tokens", "--lr-warmup-samples"),
    *("--lr-warmup-iters", "--lr-warmup-fraction", "--profile", "--profile-step-start"),
    *("--profile-step-end", "--distributed-backend", "--eval-interval", "--loss-scale"),
    *("--train-data", "--valid-data", "--pretrained-checkpoint", "--num-experts"),
}
SIZES = """--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --lr 1e-2
    --max-position-embeddings 32 --micro-batch-size 2 --global-batch-size 8 --num-workers 0
    --min-lr 1e-3"""
LENGTH = "--train-iters 10 --eval-iters 0 --log-interval 1"
TEXT = "--tokenizer-type ByteTokenizer"
GATED = "--ffn-hidden-size 128"
SMALL_STEPS = "--initial-loss-scale 1024"  # of float16: none of ten is skipped
FALLS_BY = 0.3  # of 5.5 nats at first; steps differ by less than 0.1


class Run(NamedTuple):
    """A family of scripts: one of them, other flags, and flags that two ranks cannot have."""

    script: str
    more: str
    left_out: Sequence[str] = ()
    is_wide: bool = False  # not in `make test`


RUNS = (
    Run(
        "pretrain_gpt_distributed_with_mp.sh",
        f"--tensor-model-parallel-size 1 {SMALL_STEPS}",
    ),
    Run("MoE/ds_pretrain_gpt_{350M,1.3B,6.7B}_dense.sh and compression/..._350M_dense_kd.sh", ""),
    Run("pretrain_llama2_distributed.sh", f"{GATED} --pipeline-model-parallel-size 1"),
    Run(
        "llama/train_llama3_8b_h100_fp8.sh",
        f"{GATED} --kv-channels 16 --num-query-groups 2 --attention-backend auto",
    ),
    Run(
        "academic_paper_scripts/sc21/run_{figure_11,...,figure_18,table_1}.sh",
        f"--tensor-model-parallel-size 2 --pipeline-model-parallel-size 1 {SMALL_STEPS}",
        is_wide=True,
    ),
    Run(
        "gpt3/train_gpt3_175b_distributed.sh",
        "--tensor-model-parallel-size 1 --pipeline-model-parallel-size 2 --rampup-batch-size 4 2 "
        f"12 {SMALL_STEPS}",
    ),
    # As its refusal says: the native engine shares experts out.
    Run(
        "MoE/ds_pretrain_gpt_{125M_MoE64,350M_MoE128,1.3B_MoE128}.sh",
        f"--num-experts 4 --moe-expert-parallel-size 2 {SMALL_STEPS}",
        ("--deepspeed", "--deepspeed_config", "--no-pipeline-parallel"),
    ),
    Run(
        "mixtral/train_mixtral_8x7b_distributed.sh",
        f"{GATED} --num-experts 4 --num-query-groups 2 --pipeline-model-parallel-size 1 "
        "--expert-model-parallel-size 2",
    ),
)


def shrunken(script: Script, more: str, left_out: Sequence[str] = (), *, folder: Path) -> list[str]:
    """The flags of a script without those that are left out, and with other sizes behind them."""
    words = list(_kept(script.words(folder), {*LEFT_OUT, *left_out}))
    return [*words, *SIZES.split(), *more.split()]


def _kept(words: Sequence[str], left_out: set[str]) -> Iterator[str]:
    is_left_out = False
    for word in words:
        if word.startswith("--"):
            is_left_out = word in left_out
        if not is_left_out:
            yield word


def trained(folder: Path, words: Sequence[str], program: str = "pretrain_gpt.py") -> str:
    """Run a program on two ranks, and return what both printed: the last one has the losses."""
    with each_rank(2, words, cwds=[folder], program=str(ROOT / program)) as ranks:
        first, second = all_ended(ranks)
    assert (first.status, second.status) == (0, 0), first.text + second.text
    return first.out + second.out


def losses_of(output: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"lm loss: ([\d.E+-]+) ", output)]


def assert_falls(losses: Sequence[float], *, steps: int) -> None:
    assert len(losses) == steps
    assert losses[-1] < losses[0] - FALLS_BY


@pytest.mark.parametrize(
    "run",
    [
        pytest.param(run, id=run.script, marks=[pytest.mark.wide] if run.is_wide else [])
        for run in RUNS
    ],
)
def test_a_shrunken_script_learns(tmp_path: Path, run: Run) -> None:
    words = shrunken(SCRIPTS[run.script], run.more, run.left_out, folder=tmp_path)
    words += [*LENGTH.split(), *TEXT.split(), "--data-path", byte_corpus(tmp_path)]
    assert_falls(losses_of(trained(tmp_path, words)), steps=10)


def test_a_shrunken_script_of_bert_learns(tmp_path: Path) -> None:
    corpus = write_tiny_sentences(tmp_path)
    with Path(corpus.vocab_file).open("a") as vocabulary:  # what is learned: these do not occur
        vocabulary.writelines(f"unused{at}\n" for at in range(500))
    script = SCRIPTS["pretrain_bert_distributed_with_mp.sh"]
    more = f"--tensor-model-parallel-size 1 {SMALL_STEPS} {LENGTH} --vocab-file {corpus.vocab_file}"
    words = [*shrunken(script, more, folder=tmp_path), "--data-path", corpus.prefix]
    output = trained(tmp_path, words, "pretrain_bert.py")
    assert_falls(losses_of(output), steps=10)


def test_a_shrunken_script_of_fine_tuning_learns(tmp_path: Path) -> None:
    prepared = prepare(tmp_path)
    train = write_task(tmp_path / "train.tsv", seed=0, examples=64)
    script = SCRIPTS["finetune_mnli_distributed.sh"]
    more = f"""{SMALL_STEPS} --task RTE --train-data {train} --valid-data {prepared.valid}
        --pretrained-checkpoint {prepared.pretrained} --vocab-file {prepared.vocab}
        --hidden-size 16 --seq-length 24 --max-position-embeddings 24 --log-interval 1
        --make-vocab-size-divisible-by 4"""
    output = trained(tmp_path, shrunken(script, more, ["--task"], folder=tmp_path), "tasks/main.py")
    losses = [float(loss) for loss in re.findall(r"training loss: ([\d.E+-]+) ", output)]
    assert len(losses) == 5  # epochs
    assert losses[-1] < losses[0] - 0.1, losses  # of 0.7 nats at first


@pytest.mark.wide
def test_a_shrunken_script_of_a_curriculum_learns(tmp_path: Path) -> None:
    script = SCRIPTS["MoE/ds_pretrain_gpt_{125M,1.3B}_dense_cl.sh"]
    grows = {
        "enabled": True,
        "curriculum_type": "seqlen",
        "min_difficulty": 8,
        "max_difficulty": 32,
        "schedule_type": "fixed_linear",
        "schedule_config": {"total_curriculum_step": 5, "difficulty_step": 8},
    }
    script = script._replace(settings={**(script.settings or {}), "curriculum_learning": grows})
    more = f"--tensor-model-parallel-size 1 {LENGTH} {TEXT} --data-path {byte_corpus(tmp_path)}"
    output = trained(tmp_path, shrunken(script, more, folder=tmp_path))
    assert_falls(losses_of(output), steps=10)
    assert re.search(r"consumed tokens: +64 ", output)  # eight samples of the first length
