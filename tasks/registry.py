"""The tasks by name: where each one's program is, and which packages it needs beside ours.

Nothing is imported before a task is chosen, so one that lacks a package is no obstacle to the
others. A test resolves every line.
"""

import difflib
import importlib
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from megatron.errors import ConfigError, MachineError

Program = Callable[[str, Sequence[str]], None]  # takes the name of the task and the other flags


@dataclass(frozen=True)
class Task:
    """One task.

    Attributes:
        program: "module:function", a `Program`.
        about: one line for --help.
        packages: what it imports beside our own dependencies; (import name, name for pip).
    """

    program: str
    about: str
    packages: tuple[tuple[str, str], ...] = ()

    def load(self, name: str) -> Program:
        """Return the task's program; MachineError when a package is missing."""
        missing = [pip for module, pip in self.packages if importlib.util.find_spec(module) is None]
        if missing:
            raise MachineError(
                f"the task {name} needs a package that is not installed",
                found=f"no {', '.join(missing)}",
                fix=f"pip install {' '.join(missing)}",
            )
        module, _, function = self.program.partition(":")
        program: Program = getattr(importlib.import_module(module), function)
        return program


_ZEROSHOT = "tasks.zeroshot.program:main"

_FINETUNE = "tasks.finetune.program:main"
_METRICS = (("sklearn", "scikit-learn"), ("scipy", "scipy"))
_GLUE = {
    "COLA": "whether a sentence is acceptable English",
    "MNLI": "whether one sentence follows from another, of many genres",
    "MRPC": "whether two sentences say the same (news)",
    "QNLI": "whether a sentence answers a question",
    "QQP": "whether two questions are the same",
    "RACE": "which of four answers is right, given a passage",
    "RTE": "whether one sentence follows from another",
    "SNLI": "whether one caption follows from another",
    "SST-2": "whether a review is favourable",
    "STS-B": "how alike two sentences are, 0 to 5",
    "WNLI": "whether a sentence follows, by what a pronoun means",
}

TASKS: Mapping[str, Task] = MappingProxyType(
    {
        **{
            name: Task(_FINETUNE, f"a BERT learns {about}", _METRICS)
            for name, about in _GLUE.items()
        },
        "ICT-ZEROSHOT-NQ": Task(
            "tasks.retrieval.nq:main", "a retriever finds blocks of text that hold an answer"
        ),
        "RETRIEVER-EVAL": Task("tasks.retrieval.nq:main", "the same, by its name in Megatron-LM"),
        "RET-FINETUNE-NQ": Task(
            "tasks.retrieval.finetune:main", "a retriever learns from questions and their blocks"
        ),
        "ENSEMBLE-CLASSIFIER": Task(
            "tasks.finetune.ensemble_program:main",
            "predictions of several fine-tuned models are joined into one",
            _METRICS,
        ),
        "VISION-CLASSIFY": Task(
            "tasks.vision.classification:main",
            "a ViT learns classes of images, or is evaluated on them",
            (("PIL", "pillow"),),
        ),
        "LM-EVAL": Task(
            "tasks.eval_harness.program:main",
            "a GPT answers the tasks of EleutherAI's lm-eval-harness",
            (("lm_eval", "lm-eval"),),
        ),
        "LAMBADA": Task(_ZEROSHOT, "a GPT guesses the last word of passages (accuracy)"),
        "WIKITEXT103": Task(_ZEROSHOT, "a GPT's perplexity on text in WikiText's form"),
        "PERPLEXITY": Task(_ZEROSHOT, "a GPT's perplexity on any text, as it is"),
        "LOGLIKELIHOOD": Task(_ZEROSHOT, "how likely a GPT finds given continuations of contexts"),
        "CHOICE": Task(_ZEROSHOT, "which of several choices a GPT finds likeliest (accuracy)"),
    }
)


def find(name: str) -> Task:
    """Return the task named `name`; ConfigError with the nearest names if there is none."""
    if name in TASKS:
        return TASKS[name]
    near = difflib.get_close_matches(name.upper(), TASKS, n=2, cutoff=0.5)
    raise ConfigError(
        "there is no such task",
        found=f"--task {name}",
        fix=f"did you mean {' or '.join(near)}?" if near else f"use one of {', '.join(TASKS)}",
    )
