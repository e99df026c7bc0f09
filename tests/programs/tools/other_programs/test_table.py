"""Every program of the table stands at its path, in one style, and leads to one of ours."""

import importlib.util
from pathlib import Path

import pytest

from tests.architecture.source_tree import ROOT
from tools.other_programs.table import PROGRAMS
from tools.other_programs.words import translated

STARTS = """
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[{depth}]))

from tools.other_programs.start import start

if __name__ == "__main__":
    start("{path}")
"""


@pytest.mark.parametrize("path", PROGRAMS)
def test_a_program_is_a_call_of_one_of_ours(path: str) -> None:
    about, _, rest = (ROOT / path).read_text().partition("\n")
    assert about.startswith('"""Another Megatron\'s path of ')
    assert rest == STARTS.format(path=path, depth=len(Path(path).parts) - 1)
    ours = PROGRAMS[path].module
    assert importlib.util.find_spec(ours) is not None
    assert (ROOT / f"{ours.replace('.', '/')}.py").is_file()


GENERATION = "tools/generate_samples_gpt.py"


@pytest.mark.parametrize(
    ("path", "given", "ours"),
    [
        (GENERATION, "--load c", "--load c --num-tokens 1024 --interactive"),
        (GENERATION, "--num-samples 0", "--num-tokens 1024 --interactive"),
        (
            GENERATION,
            "--num-samples 2 --genfile g --out-seq-length 8 --top_p 0.9",
            "--num-samples 2 --output g --num-tokens 8 --top-p 0.9 --prompt  --json",
        ),
        (
            GENERATION,
            "--sample-input-file p --recompute",
            "--prompt-file p --num-tokens 1024 --output p.out",
        ),
        (
            GENERATION,
            "--sample-input-file p --sample-output-file o --out-seq-length 8",
            "--prompt-file p --output o --num-tokens 8",
        ),
        (
            "tools/merge_mp_partitions.py",
            "--model-type GPT --load a --save b --tensor-model-parallel-size 4 --num-layers 2 "
            "--pipeline-model-parallel-size 1 --target-pipeline-model-parallel-size 2",
            "--format megatron --load a --save b --pipeline-model-parallel-size 2",
        ),
        (
            "tools/convert_checkpoint/deepspeed_to_deepspeed.py",
            "--input_folder a --output_folder b --target_tp 2 --target_pp 1 --target_dp 4",
            "--format universal --load a --save b",
        ),
        (
            "tools/convert_checkpoint/deepspeed_to_transformers.py",
            "--input_folder a --output_folder b --target_tp 1 --for_release",
            "--format huggingface --load a --save b",
        ),
        (
            "tools/convert_checkpoint/ds_to_universal.py",
            "--input_folder a --output_folder b --num_extract_workers 4 --num_merge_workers 2",
            "--format universal --load a --save b",
        ),
        (
            "tasks/eval_harness/evaluate.py",
            "--load a --task_list b,c --results_path r --adaptive_seq_len",
            "--task LM-EVAL --load a --task_list b,c --results_path r --adaptive_seq_len",
        ),
    ],
)
def test_command_lines_of_scripts_are_those_of_ours(path: str, given: str, ours: str) -> None:
    assert translated(PROGRAMS[path], given.split()).words == ours.split(" ")
