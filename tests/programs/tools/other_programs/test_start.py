"""Programs run at the paths that scripts of other Megatrons call."""

import json
import sys
from pathlib import Path

import pytest

from tests.architecture.source_tree import ROOT
from tests.support.launch import Ended, pretrain_words, run_program, small_run

pytestmark = pytest.mark.slow


def run(path: str, *words: str, cwd: Path) -> Ended:
    return run_program([sys.executable, str(ROOT / path), *words], cwd=cwd)


def test_a_corpus_is_made_and_merged(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text(json.dumps({"text": "one two"}) + "\n")
    words = "--input t.jsonl --output-prefix a --dataset-impl mmap --tokenizer-type ByteTokenizer"
    made = run("tools/preprocess_data_many_cores.py", *words.split(), cwd=tmp_path)
    assert made.status == 0, made.text
    words = "--datasets a_text_document a_text_document --output-prefix b --torch-backend gloo"
    merged = run("tools/merge_preprocessed_data.py", *words.split(), cwd=tmp_path)
    assert merged.status == 0, merged.text
    assert "--torch-backend gloo: accepted, has no effect here because" in merged.out
    assert (tmp_path / "b.bin").read_bytes() == 2 * (tmp_path / "a_text_document.bin").read_bytes()


def test_a_run_becomes_the_files_of_two_ranks_then_of_one_and_writes_text(tmp_path: Path) -> None:
    trained = run_program(pretrain_words(*small_run(None, "--save", "run")), cwd=tmp_path)
    assert trained.status == 0, trained.text
    folders = ["--input_folder", "run", "--output_folder", "two"]
    path = "tools/convert_checkpoint/deepspeed_to_megatron.py"
    made = run(path, *folders, "--target_tp", "2", "--for_release", cwd=tmp_path)
    assert made.status == 0, made.text
    words = "--model-type GPT --load two --save one --tensor-model-parallel-size 2 --num-layers 2"
    merged = run("tools/merge_mp_partitions.py", *words.split(), cwd=tmp_path)
    assert merged.status == 0, merged.text
    assert len([*(tmp_path / "two").rglob("*.pt")]) == 2
    assert len([*(tmp_path / "one").rglob("*.pt")]) == 1
    shown = run("tools/convert_checkpoint/inspect_checkpoint.py", "one", cwd=tmp_path)
    assert "format: megatron" in shown.out
    (tmp_path / "p.txt").write_text("one\n")
    words = "--load run --sample-input-file p.txt --out-seq-length 4 --greedy"
    written = run("tools/generate_samples_gpt.py", *words.split(), cwd=tmp_path)
    assert written.status == 0, written.text
    assert (tmp_path / "p.txt.out").read_text().startswith("one")


def test_an_error_is_that_of_a_program(tmp_path: Path) -> None:
    path, nowhere = "tools/generate_samples_gpt.py", ("--load", "nowhere")
    ended = run(path, *nowhere, "--out-seq-length", cwd=tmp_path)
    assert ended.status == 64
    assert "a flag lacks its value" in ended.err
    ended = run(path, *nowhere, cwd=tmp_path)
    assert ended.status == 66, ended.text
