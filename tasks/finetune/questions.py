"""What is decided in each task of fine-tuning, by the task's name."""

from collections.abc import Mapping
from types import MappingProxyType

from tasks.finetune import race
from tasks.finetune.examples import ClassificationQuestion
from tasks.finetune.glue import TASKS

RACE = "RACE"

QUESTIONS: Mapping[str, ClassificationQuestion] = MappingProxyType(
    {**{name: task.question for name, task in TASKS.items()}, RACE: race.QUESTION}
)
