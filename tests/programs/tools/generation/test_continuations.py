"""generate_text.py answers with a T5 what transformers does; what it does not have is refused."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import T5ForConditionalGeneration

from megatron.errors import CheckpointError, ConfigError
from tests.support.launch import ROOT, run_program
from tests.support.t5.huggingface import VOCABULARY, save_t5
from tools.flags.model import ModelChoice
from tools.generate_text import parser
from tools.generation.continuations import decoder_writer, text_to_text_writer

GENERATE = str(ROOT / "tools" / "generate_text.py")
SERVE = str(ROOT / "tools" / "run_text_generation_server.py")
END = VOCABULARY - 1  # of the numbers that are read where a folder has no tokenizer
PROMPTS = ("7 3 9", "4 4")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_t5("1.1", tmp_path_factory.mktemp("t5") / "model", num_decoder_layers=2)


def expected(folder: Path, **options: Any) -> list[list[int]]:
    inputs = [[*map(int, prompt.split()), END] for prompt in PROMPTS]
    width = max(map(len, inputs))
    rows = T5ForConditionalGeneration.from_pretrained(folder).generate(
        input_ids=torch.tensor([[*row, *[0] * (width - len(row))] for row in inputs]),
        attention_mask=torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in inputs]),
        decoder_start_token_id=END,
        eos_token_id=END,
        pad_token_id=0,
        max_new_tokens=6,
        do_sample=False,
        **options,
    )
    answers = [row[1:] for row in rows.tolist()]
    return [row[: row.index(END)] if END in row else row for row in answers]


@pytest.mark.slow
def test_a_t5_answers_what_it_does_in_transformers(folder: Path, tmp_path: Path) -> None:
    words = [sys.executable, GENERATE, "--load", str(folder), "--num-tokens", "6", "--json"]
    words += [word for prompt in PROMPTS for word in ("--prompt", prompt)]
    beams = ["--num-beams", "3", "--length-penalty", "0.5", "--num-samples", "2"]
    for flags, options in (
        (["--greedy"], {}),
        (beams, {"num_beams": 3, "length_penalty": 0.5, "num_return_sequences": 2}),
    ):
        done = run_program([*words, *flags], cwd=tmp_path)
        assert done.status == 0, done.text
        rows = [json.loads(line) for line in done.out.splitlines() if line.startswith("{")]
        assert [row["tokens"] for row in rows] == expected(folder, **options)
        assert [row["text"] for row in rows] == [" ".join(map(str, r["tokens"])) for r in rows]


@pytest.mark.slow
def test_the_server_refuses_a_t5_by_name(folder: Path, tmp_path: Path) -> None:
    done = run_program([sys.executable, SERVE, "--load", str(folder), "--port", "0"], cwd=tmp_path)
    assert done.status == CheckpointError.exit_code
    assert "holds a T5 (kind t5), and this program takes a GPT" in done.text


def flags(*words: str) -> tuple[argparse.Namespace, ModelChoice]:
    args = parser().parse_args(["--load", "nowhere", "--prompt", "a", *words])
    return args, ModelChoice("nowhere", None, {}, args.weight_quantization)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--device-map", "auto"), "--device-map auto"),
        (("--weight-quantization", "int8"), "--weight-quantization int8"),
        (("--num-beams", "4", "--greedy"), "--num-beams 4, --greedy"),
        (("--num-beams", "4", "--top-p", "0.5"), "--num-beams 4, --top-p"),
        (("--num-beams", "2", "--num-samples", "3"), "use --num-beams 3 or more"),
        (("--num-beams", "0"), "the number of beams is not positive"),
    ],
)
def test_what_a_t5_does_not_do_is_refused_before_it_is_loaded(
    words: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ConfigError) as error:
        text_to_text_writer(*flags(*words))
    assert message in str(error.value)


def test_beams_are_refused_for_a_model_of_one_stack() -> None:
    with pytest.raises(ConfigError, match="models of an encoder and a decoder"):
        decoder_writer(*flags("--num-beams", "2"))
