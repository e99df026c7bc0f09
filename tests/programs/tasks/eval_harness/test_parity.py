"""The harness gets equal results from our models, `transformers` and our own evaluator.

The other side is a model of the harness that sends transformers one request at a time.
"""

import json
import math
from pathlib import Path
from typing import Any

import lm_eval
import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from tests.programs.tasks.models import Exported, evaluated

PER_TOKEN = 1e-5  # float32, sums of a few hundred terms in another order
LENGTH = 32

QUESTIONS = [
    ("the cat sat on a", ["mat", "dog", "mat and saw two dogs"], 0),
    ("two dogs run over", ["the cat", "green hills"], 1),
    ("while rain fell", ["far away", "a", "saw"], 2),
    (
        "a mat and saw two dogs run over green hills far away while rain fell " * 2,
        ["cat", "sat"],
        0,
    ),
]
TEXTS = ["the cat sat on a mat", "two dogs run over green hills far away while rain fell " * 5]
BEGINNINGS = ["the cat sat", "two dogs", "a mat and saw two dogs run over green hills far " * 3]

# What bigscience's script gives its evaluation beside files.
SCRIPT = (
    "--adaptive_seq_len --intermed_results --micro_bs_multiplier 4 --inference --eval_fp32 "
    "--num-layers -1 --hidden-size -1 --num-attention-heads -1 --max-position-embeddings -1 "
    "--seq-length -1 --no-load-optim --no-load-rng --deepspeed --deepspeed_config ds.json"
)

COMMON = """\
task: {name}
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
doc_to_text: "{{{{context}}}}"
"""
CHOICE = """\
output_type: multiple_choice
doc_to_target: "{{label}}"
doc_to_choice: "{{choices}}"
metric_list:
  - metric: acc
  - metric: acc_norm
"""
ROLLING = """\
output_type: loglikelihood_rolling
doc_to_target: "{{context}}"
metric_list:
  - metric: word_perplexity
  - metric: byte_perplexity
"""
WRITING = """\
output_type: generate_until
doc_to_target: "{{target}}"
generation_kwargs:
  until: ["at", "zzz"]
  max_gen_toks: 8
metric_list:
  - metric: exact_match
"""
TASKS = {"t_choice": CHOICE, "t_rolling": ROLLING, "t_writing": WRITING}


class OneAtATime(TemplateLM):  # type: ignore[misc]  # lm_eval is untyped
    """transformers, asked for each request by itself."""

    def __init__(self, folder: Path) -> None:
        import transformers  # in seconds, which ranks that read this file need not wait for

        super().__init__()
        self.inner = transformers.AutoTokenizer.from_pretrained(folder)
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()

    @property
    def eot_token_id(self) -> int:
        return int(self.inner.convert_tokens_to_ids("<|endoftext|>"))

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        return list(self.inner(string, add_special_tokens=False)["input_ids"])

    @torch.no_grad()
    def _loglikelihood_tokens(self, requests: Any, **kwargs: Any) -> list[tuple[float, bool]]:
        found = []
        for _, given, continuation in requests:
            tokens = [*given, *continuation][-LENGTH - 1 :]
            logits = self.model(torch.tensor([tokens[:-1]])).logits[0, -len(continuation) :]
            scores, wanted = logits.log_softmax(-1), torch.tensor(continuation)
            total = float(scores.gather(1, wanted.unsqueeze(1)).sum())
            found.append((total, bool((scores.argmax(-1) == wanted).all())))
        return found

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
        found = []
        for (text,) in (request.args for request in requests):
            windows = get_rolling_token_windows(
                self.tok_encode(text), self.eot_token_id, max_seq_len=LENGTH, context_len=1
            )
            pairs = [(None, *make_disjoint_window(window)) for window in windows]
            found.append(math.fsum(score for score, _ in self._loglikelihood_tokens(pairs)))
        return found

    @torch.no_grad()
    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        texts = []
        for context, settings in (request.args for request in requests):
            new = settings["max_gen_toks"]
            prompt = torch.tensor([self.tok_encode(context)[-(LENGTH - new) :]])
            out = self.model.generate(
                prompt, max_new_tokens=new, do_sample=False, eos_token_id=self.eot_token_id,
                pad_token_id=self.eot_token_id,
            )  # fmt: skip
            text = self.inner.decode(out[0, prompt.shape[1] :], skip_special_tokens=True)
            for stop in settings["until"]:
                text = text.split(stop)[0]
            texts.append(text)
        return texts


@pytest.fixture(scope="module")
def tasks(models: Exported) -> Path:
    """A folder of tasks, and of the lines that they read."""
    folder = models.ours.parent / "tasks"
    folder.mkdir()
    lines: dict[str, list[dict[str, Any]]] = {
        "t_choice": [
            {"context": context, "choices": choices, "label": label}
            for context, choices, label in QUESTIONS
        ],
        "t_rolling": [{"context": text} for text in TEXTS],
        "t_writing": [{"context": text, "target": "x"} for text in BEGINNINGS],
    }
    # A table has columns of one kind: questions of other numbers of choices are lists all the same.
    for name, rows in lines.items():
        data = folder / f"{name}.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        text = COMMON.format(name=name, data=data) + TASKS[name]
        (folder / f"{name}.yaml").write_text(text)
    return folder


def responses(results: Any) -> dict[str, list[Any]]:
    """What the model answered, of each task in the order of its documents."""
    return {
        name: [
            sample["filtered_resps"]
            for sample in sorted(results["samples"][name], key=lambda one: one["doc_id"])
        ]
        for name in TASKS
    }


def harness(models: Exported, tasks: Path, *words: object) -> list[object]:
    """What is given to an evaluation by the harness beside a file for its results."""
    argv = ["--task", "LM-EVAL", "--load", models.ours, "--include_path", tasks, "--only-included"]
    return [*argv, "--micro-batch-size", 3, *words]


@pytest.mark.slow
def test_the_harness_hears_what_transformers_says(
    models: Exported, tasks: Path, tmp_path: Path
) -> None:
    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    expected = lm_eval.simple_evaluate(
        model=OneAtATime(models.huggingface),
        tasks=list(TASKS),
        task_manager=manager,
        bootstrap_iters=0,
    )
    reference = responses(expected)
    words = harness(models, tasks, "--tasks", ",".join(TASKS))
    split = [*words, "--tensor-model-parallel-size", 2]
    for found in evaluated(2, {tmp_path / "rows": words, tmp_path / "tensors": split}):
        ours = responses(found)
        for actual, other in zip(ours["t_choice"], reference["t_choice"], strict=True):
            for (score, greedy), (value, is_greedy) in zip(actual, other, strict=True):
                assert score == pytest.approx(value, abs=5 * PER_TOKEN)  # at most five tokens
                assert greedy == is_greedy
        for (score,), (value,), text in zip(ours["t_rolling"], reference["t_rolling"], TEXTS):
            assert score == pytest.approx(value, abs=len(text.split()) * PER_TOKEN)
        assert ours["t_writing"] == reference["t_writing"]
        for name, metrics in expected["results"].items():
            for metric, value in metrics.items():
                if isinstance(value, float):
                    assert found["results"][name][metric] == pytest.approx(value, rel=1e-4)


@pytest.mark.slow
def test_the_harness_agrees_with_our_own_evaluator(
    models: Exported, tasks: Path, tmp_path: Path
) -> None:
    # A text in one window, given the end of a document; and given its own first word.
    lines, text = tmp_path / "lines.jsonl", tmp_path / "text.txt"
    first, rest = TEXTS[0][:3], TEXTS[0][3:]
    pairs = [{"context": "", "continuation": TEXTS[0]}, {"context": first, "continuation": rest}]
    lines.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    text.write_text(TEXTS[0])
    words = ["--tasks", "t_choice", "t_rolling", "--pipeline-model-parallel-size", 2]
    files = {"CHOICE": tasks / "t_choice.jsonl", "LOGLIKELIHOOD": lines, "PERPLEXITY": text}
    own = {
        tmp_path / task: ["--task", task, "--load", models.ours, "--valid-data", file]
        for task, file in files.items()
    }
    runs = {tmp_path / "harness": harness(models, tasks, *words), **own}
    found, choice, scored, perplexity = evaluated(2, runs)
    metrics = found["results"]["t_choice"]
    assert choice["acc"] == metrics["acc,none"]
    assert choice["acc_norm"] == metrics["acc_norm,none"]
    samples = sorted(found["samples"]["t_choice"], key=lambda one: one["doc_id"])
    for scores, sample in zip(choice["log_likelihoods"], samples, strict=True):
        values = [value for value, _ in sample["filtered_resps"]]
        assert scores == pytest.approx(values, abs=5 * PER_TOKEN)
    whole, but_the_first = scored["pairs"]
    rolling = min(found["samples"]["t_rolling"], key=lambda one: one["doc_id"])
    (value,) = rolling["filtered_resps"]
    assert whole["log_likelihood"] == pytest.approx(value, abs=whole["num_tokens"] * PER_TOKEN)
    assert perplexity["tokens"] == but_the_first["num_tokens"] == whole["num_tokens"] - 1
    total = -perplexity["loss"] * perplexity["tokens"]
    assert total == pytest.approx(but_the_first["log_likelihood"], abs=total * -PER_TOKEN)


@pytest.mark.slow
def test_flags_of_the_harness_are_those_of_its_own_program(
    models: Exported, tasks: Path, tmp_path: Path
) -> None:
    few = ["--tasks", "t_choice", "--limit", 2, "--num_fewshot", 0, *SCRIPT.split()]
    chat = ["--tasks", "t_choice", "--apply_chat_template", "chatml", "--limit", 1]
    chat += ["--system_instruction", "be short"]
    short = ["--tasks", "t_writing", "--gen_kwargs", "max_gen_toks=2"]
    runs = {
        tmp_path / str(at): harness(models, tasks, *words)
        for at, words in enumerate((few, chat, short))
    }
    limited, templated, shortened = evaluated(1, runs, output_flag="--output_path")
    assert limited["n-samples"]["t_choice"] == {"original": 4, "effective": 2}
    (sample,) = templated["samples"]["t_choice"]
    prompt = sample["arguments"][0][0]
    assert prompt.startswith("<|im_start|>system\nbe short<|im_end|>\n<|im_start|>user\nthe cat")
    assert prompt.endswith("<|im_start|>assistant\n")
    assert all(len(text.split()) <= 3 for (text,) in responses_of(shortened, "t_writing"))


def responses_of(results: Any, name: str) -> list[Any]:
    return [sample["filtered_resps"] for sample in results["samples"][name]]
