"""Every script in examples/ runs as it is written, at a size that takes seconds."""

import itertools
import json
import os
import re
import signal
import sys
from pathlib import Path

import pytest

from megatron.checkpoint.folder.run_folder import TRACKER
from tests.support.launch import (
    ROOT,
    Ended,
    Started,
    all_ended,
    free_port,
    run_program,
    write_text,
)

EXAMPLES = ROOT / "examples"
SCRIPTS = sorted(path.name for path in EXAMPLES.glob("*.sh"))
TINY = (
    "--num-layers 1 --hidden-size 32 --seq-length 80 --micro-batch-size 2 --global-batch-size 8 "
    "--eval-iters 1 --log-interval 1"
)

pytestmark = pytest.mark.slow  # each starts torchrun once or twice


def run_example(
    name: str, work: Path, *, flags: str = TINY, deepspeed: bool = False, **variables: str
) -> Ended:
    """Run it from another folder, with everything that it makes in `work`."""
    environment = {"WORK": str(work), "ITERS": "2"} | variables
    ended = run_program(
        [str(EXAMPLES / name), *flags.split()],
        cwd=work,
        environment=environment,
        within_s=180,
        warm_children=True,
        deepspeed=deepspeed,
    )
    assert ended.status == 0, ended.text
    return ended


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the first example makes of a text: data and tokenizer for the others."""
    folder = tmp_path_factory.mktemp("work")
    text = write_text(folder / "mine.txt", 1500)
    ended = run_example("pretrain_gpt_cpu.sh", folder, DATA=str(text))
    assert "tp 1 x pp 1 x dp 2" in ended.out
    assert (folder / "cpu" / TRACKER).read_text() == "2\n"
    return folder


def test_the_first_example_goes_on_where_it_was(work: Path) -> None:
    ended = run_example("pretrain_gpt_cpu.sh", work, DATA=str(work / "mine.txt"), ITERS="3")
    assert "loaded checkpoint" in ended.out
    assert "wrote" not in ended.out  # corpus and tokenizer are there
    assert (work / "cpu" / TRACKER).read_text() == "3\n"


def test_the_example_of_a_bert_makes_what_it_reads(tmp_path: Path) -> None:
    text, work = tmp_path / "sentences.txt", tmp_path
    paragraph = "The {0} saw a {1}. It ran away at once. Nobody saw the {1} again, but the {0} did."
    animals = ("fox", "dog", "hen", "cow", "owl", "rat")
    paragraphs = [paragraph.format(one, two) for one in animals for two in animals]
    text.write_text("\n\n".join(paragraphs * 8))
    ended = run_example("pretrain_bert.sh", work, DATA=str(text))
    assert "bert with" in ended.out
    assert re.search(r"lm loss: \S+ \| sop loss: \S+ \|", ended.out)
    assert "validation loss at iteration 2" in ended.out
    assert (work / "bert" / TRACKER).read_text() == "2\n"

    pairs = ["index\tsentence1\tsentence2\tlabel"]
    for at, (one, two) in enumerate(itertools.product(animals, animals)):
        label = "entailment" if one == two else "not_entailment"
        pairs.append(f"{at}\tThe {one} ran away.\tThe {two} ran away.\t{label}")
    table = tmp_path / "pairs.tsv"
    table.write_text("\n".join(pairs) + "\n")
    shape = "--num-layers 1 --hidden-size 32 --seq-length 80 --lr 1e-3"
    ended = run_example(
        "finetune_bert.sh", work, flags=shape, TRAIN=str(table), VALID=str(table), EPOCHS="1"
    )
    assert re.search(r"RTE \| examples: 36 \| accuracy: 0\.\d+", ended.out)
    assert len((work / "predictions.tsv").read_text().splitlines()) == 37


def test_the_example_of_a_retriever_goes_from_text_to_answers(tmp_path: Path) -> None:
    documents = tmp_path / "mine.jsonl"
    sentence = "The {0} saw a {1}. It ran away at once. Nobody saw the {1} again."
    animals = ("fox", "dog", "hen", "cow", "owl", "rat", "bee", "cat", "elk", "yak")
    rows = [
        {"title": f"{one} and {two}", "text": sentence.format(one, two)}
        for one in animals
        for two in animals
    ]
    documents.write_text("".join(json.dumps(row) + "\n" for row in rows * 2))
    flags = "--seq-length 40 --hidden-size 32 --global-batch-size 8 --micro-batch-size 4"
    ended = run_example("pretrain_ict.sh", tmp_path, flags=flags, DOCUMENTS=str(documents))
    assert "biencoder with" in ended.out
    assert re.search(r"validation after 2 steps \| retrieval loss \S+ \| top1_acc ", ended.out)
    assert "blocks in 2 files" in ended.out
    assert re.search(r"ICT-ZEROSHOT-NQ \| dev \| 1 questions \| top-1: ", ended.out)


def test_the_example_of_an_evaluation_scores_and_exports(work: Path) -> None:
    text = work / "unseen.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 40)
    ended = run_example("evaluate_gpt.sh", work, flags="", TEXT=str(text))
    assert re.search(r"\| ppl: \d\.\d+E\+0\d \|", ended.out)
    assert (work / "export" / "config.json").is_file()


@pytest.mark.parametrize(
    ("name", "folder", "layout"),
    [
        pytest.param("pretrain_gpt_tp.sh", "tp", "tp 2 x pp 1 x dp 1", marks=pytest.mark.wide),
        pytest.param("pretrain_gpt_dp.sh", "dp", "tp 1 x pp 1 x dp 2", marks=pytest.mark.wide),
        ("pretrain_llama_style.sh", "llama", "tp 1 x pp 1 x dp 2"),
        ("pretrain_gpt_moe.sh", "moe", "tp 2 x pp 1 x dp 1"),
        pytest.param("pretrain_fim.sh", "fim", "tp 1 x pp 1 x dp 2", marks=pytest.mark.wide),
        ("finetune_chat.sh", "chat", "tp 1 x pp 1 x dp 2"),
    ],
)
def test_an_example_trains_and_saves(name: str, folder: str, layout: str, work: Path) -> None:
    ended = run_example(name, work)
    assert layout in ended.out
    assert "validation loss at iteration 2" in ended.out
    assert (work / folder / TRACKER).read_text() == "2\n"


@pytest.mark.wide
def test_the_example_of_a_t5_makes_what_it_reads(tmp_path: Path) -> None:
    text = write_text(tmp_path / "mine.txt", 800)
    ended = run_example("pretrain_t5.sh", tmp_path, DATA=str(text))
    assert "t5 with" in ended.out
    assert "validation loss at iteration 2" in ended.out
    assert (tmp_path / "t5" / TRACKER).read_text() == "2\n"
    shape = TINY.replace("80", "16")  # which the pairs of the example just fit into
    ended = run_example("finetune_t5.sh", tmp_path, flags=shape)
    assert (tmp_path / "t5_answers" / TRACKER).read_text() == "2\n"
    assert "--- " in ended.out  # the answer to a prompt


def test_pairs_are_learned_from_the_weights_of_a_prefix_lm(work: Path) -> None:
    for name, folder in (("pretrain_prefix_lm.sh", "prefix_lm"), ("finetune_t0.sh", "t0")):
        ended = run_example(name, work)
        assert "prefix_lm with" in ended.out
        assert (work / folder / TRACKER).read_text() == "2\n"


@pytest.mark.wide
def test_classes_of_images_are_learned_and_tuned(tmp_path: Path) -> None:
    ended = run_example("pretrain_vit.sh", tmp_path, flags="--hidden-dropout 0")
    assert "vit with" in ended.out
    assert re.search(r"VISION-CLASSIFY \| images: 30 \| top-1: \d\.\d{4} \|", ended.out)
    assert (tmp_path / "vit" / TRACKER).read_text() == "2\n"


@pytest.mark.parametrize("stage", [pytest.param("2", marks=pytest.mark.wide), "3"])
def test_the_example_of_zero_trains_and_saves(work: Path, stage: str) -> None:
    flags = f"{TINY} --save {work}/zero{stage} --load {work}/zero{stage}"
    ended = run_example("pretrain_gpt_zero.sh", work, flags=flags, STAGE=stage, deepspeed=True)
    assert "tp 1 x pp 1 x dp 2" in ended.out
    assert (work / f"zero{stage}" / TRACKER).read_text() == "2\n"


def test_the_launcher_of_deepspeed_starts_two_processes_with_a_curriculum(work: Path) -> None:
    flags = TINY.replace("--seq-length 80 ", "")  # the JSON's curriculum ends at 128
    # The one run whose processes import DeepSpeed themselves, as a user's do.
    ended = run_example("pretrain_gpt_deepspeed.sh", work, flags=flags, PORT=str(free_port()))
    assert "tp 1 x pp 1 x dp 2" in ended.out
    assert "curriculum fixed_linear: 16 to 128 tokens over 60 iterations" in ended.out
    lengths = re.findall(r"curriculum seqlen: +(\d+) ", ended.out)
    assert lengths == ["16", "16"]
    assert (work / "deepspeed" / TRACKER).read_text() == "2\n"


def test_two_nodes_of_a_hostfile_train_together(work: Path) -> None:
    """Both are this machine, by two names; each has one process, as on two machines."""
    hosts = work / "hosts"
    hosts.write_text("localhost slots=1\n127.0.0.1 slots=1\n")
    common = {"WORK": str(work), "ITERS": "2", "HOSTFILE": str(hosts), "MASTER": "127.0.0.1"}
    common |= {"PORT": str(free_port())}
    words = [str(EXAMPLES / "pretrain_gpt_two_nodes.sh"), *TINY.split()]

    def node(rank: int) -> Started:
        of_node = common | {"NODE_RANK": str(rank)}
        # DeepSpeed's launcher imports all of it.
        return Started(words, cwd=work, environment=of_node, warm_children=True, deepspeed=True)

    with node(0) as first, node(1) as second:
        ended = all_ended([first, second], within_s=180)
    assert [one.status for one in ended] == [0, 0], "".join(one.text for one in ended)
    assert "tp 1 x pp 1 x dp 2" in ended[0].out
    assert "validation loss at iteration 2" in ended[1].out, "the last rank says it"
    assert (work / "nodes" / TRACKER).read_text() == "2\n"


def test_a_job_of_slurm_finds_itself_together(work: Path, tmp_path: Path) -> None:
    """A stand-in for srun sets the variables of Slurm for two tasks on two nodes."""
    stand_in = tmp_path / "srun"
    program = ROOT / "tests" / "support" / "example_scripts" / "srun.py"
    stand_in.write_text(f'#!/bin/sh\nexec {sys.executable} {program} "$@"\n')
    stand_in.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    script = tmp_path / "slurm_script"  # Slurm runs a copy, from where the job was submitted
    script.write_text((EXAMPLES / "pretrain_gpt_slurm.sh").read_text())
    script.chmod(0o755)
    variables = {"WORK": str(work), "ITERS": "2", "PATH": path, "SLURM_SUBMIT_DIR": str(ROOT)}
    variables |= {"SLURM_NTASKS": "2", "SLURM_PROCID": "0"}  # as a batch script has them
    ended = run_program(
        [str(script), *TINY.split()],
        cwd=work,
        environment=variables,
        within_s=180,
        warm_children=True,
    )
    assert ended.status == 0, ended.text
    assert "tp 1 x pp 1 x dp 2" in ended.out
    assert (work / "slurm" / TRACKER).read_text() == "2\n"


def test_a_rank_that_is_killed_is_started_again_and_resumes(work: Path) -> None:
    variables = {"WORK": str(work), "ITERS": "400", "RANKS": "1", "PORT": str(free_port())}
    flags = [*TINY.split(), "--save-interval", "1", "--keep-last", "2", "--exit-interval", "10"]
    script = str(EXAMPLES / "pretrain_gpt_elastic.sh")
    with Started([script, *flags], cwd=work, environment=variables) as job:
        job.wait_for("iteration        3/")
        (rank,) = job.ranks()
        os.kill(rank, signal.SIGKILL)
        ended = job.ended(within_s=180)
    assert ended.status == 0, ended.text
    assert "loaded checkpoint" in ended.out
    assert (work / "elastic" / TRACKER).read_text() == "10\n"


def test_the_example_of_resuming_stops_goes_on_and_writes(work: Path) -> None:
    ended = run_example("resume_and_generate.sh", work, PROMPT="the cat")
    order = ["exiting program at iteration 1", "iter_0000001 at iteration 1", "complete", "verif"]
    places = [ended.out.index(words) for words in [*order, "\nthe cat"]]
    assert places == sorted(places)


def test_the_readme_lists_every_example_with_its_variables() -> None:
    rows = {
        match[1]: match[2]
        for match in re.finditer(
            r"^\| \[(\w+\.sh)\]\(\1\) \| .* \| (.*) \|$", (EXAMPLES / "README.md").read_text(), re.M
        )
    }
    assert sorted(rows) == SCRIPTS
    for name, row in rows.items():
        script = (EXAMPLES / name).read_text()
        variables = set(re.findall(r"^([A-Z_]+)=\$\{", script, re.M)) - {"PYTHON"}
        assert set(re.findall(r"`([A-Z_]+)`", row)) == variables, name
        assert os.access(EXAMPLES / name, os.X_OK), f"{name} cannot be executed"
