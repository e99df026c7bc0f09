"""The flags of tasks and of text generation are read as their programs read them."""

import pytest

from tools.launch_scripts.task_flags import TASKS, check_flags

MODEL = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --load c"
TUNING = (
    "--task MNLI --train-data t --valid-data v w --pretrained-checkpoint p --num-layers 2 "
    "--hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 "
    "--micro-batch-size 2 --lr 1e-4 --vocab-file v"
)
RETRIEVER = (
    "--train-data t --valid-data v --num-layers 2 --hidden-size 64 --num-attention-heads 4 "
    "--seq-length 32 --micro-batch-size 2 --lr 1e-4 --vocab-file v"
)
HARNESS = "tasks/eval_harness/evaluate.py"
GENERATION = "tools/generate_samples_gpt.py"


@pytest.mark.parametrize(
    ("program", "words"),
    [
        (TASKS, TUNING),
        (TASKS, f"{TUNING} --finetune --eval-iters 3"),
        (TASKS, f"--task LAMBADA {MODEL} --valid-data v --batch-size 8 --strict-lambada"),
        (TASKS, f"--task=WIKITEXT103 {MODEL} --valid-data v --micro-batch-size 8"),
        (TASKS, f"--task RET-FINETUNE-NQ {RETRIEVER} --ict-load c --train-with-neg"),
        (TASKS, f"--task ICT-ZEROSHOT-NQ {MODEL} --embedding-path i --evidence-data-path e"),
        (HARNESS, f"{MODEL} --task_list a,b --num-layers -1 --eval_fp32 --micro_bs_multiplier 4"),
        (GENERATION, f"{MODEL} --batch-size 2 --genfile g --num-samples 2 --top_p 0.9"),
        ("tools/generate_text.py", f"{MODEL} --prompt The"),
    ],
)
def test_flags_that_a_program_takes_are_right(program: str, words: str) -> None:
    checked = check_flags(program, words.split())
    assert checked is not None
    assert checked.errors == []
    assert (checked.config is not None) == ("--train-data" in words)  # a training has a layout


@pytest.mark.parametrize(
    ("program", "words", "problem", "found"),
    [
        (TASKS, MODEL, "no task was chosen", "no --task"),
        (TASKS, "--task ICT-ZEROSHOT-NQ", "a flag is used wrongly", "required: --load"),
        (TASKS, f"--task RET-FINETUNE-NQ {RETRIEVER}", "begins with a model", "--bert-load"),
        (TASKS, "--task NOTHING", "there is no such task", "--task NOTHING"),
        (TASKS, f"{TUNING} --train-iters 3", "means nothing for fine-tuning", "--train-iters"),
        (TASKS, f"{TUNING} --warmup 3", "this flag was removed long ago", "--warmup"),
        (TASKS, f"--task LAMBADA {MODEL}", "a flag is used wrongly", "required: --valid-data"),
        (TASKS, f"--task LAMBADA {MODEL} --valid-data v --x 1", "there is no such flag", "--x"),
        (HARNESS, f"{MODEL} --task_list a --fp32 --bf16", "more than one precision", "--bf16"),
        (GENERATION, f"{MODEL} --genfile", "a flag lacks its value", "--genfile"),
    ],
)
def test_what_a_program_refuses_is_an_error(
    program: str, words: str, problem: str, found: str
) -> None:
    checked = check_flags(program, words.split())
    assert checked is not None
    (error,) = checked.errors
    assert problem in error.problem
    assert found in error.found


def test_flags_of_other_programs_are_not_read() -> None:
    assert check_flags("tools/preprocess_data.py", ["--input", "a"]) is None
    assert check_flags("tools/merge_mp_partitions.py", ["--load", "c"]) is None
    assert check_flags(TASKS, ["--task", "ENSEMBLE-CLASSIFIER", "--paths", "a"]) is None


def test_notes_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    check_flags(GENERATION, f"{MODEL} --recompute --num-samples 0".split())
    assert "--recompute: accepted, has no effect here" in capsys.readouterr().out
