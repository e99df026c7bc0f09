"""The main of a pretraining program: flags first, then whatever takes seconds to import.

So `--help` and errors of flags do not import torch. The rest of such a program is in its own file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from megatron.arguments import CommandLineError, parse_args
from megatron.config.run import RunConfig

if TYPE_CHECKING:
    from megatron.engine.base import PretrainTask


def pretrain_from_flags(
    task_of: Callable[[RunConfig], PretrainTask],
    *,
    tokenizer_type: str,
    defaults: Mapping[str, object] | None = None,
    adapted: Callable[[RunConfig], RunConfig] = lambda config: config,
) -> None:
    """Read the command line and train the task that `task_of` returns for it.

    Args:
        task_of: called once the flags are known; whatever imports torch is imported by it.
        tokenizer_type: of scripts that name none.
        defaults: values of further flags that the command line does not give.
        adapted: returns the run as the program understands its flags.

    Raises:
        PreflightError: with all errors of the flags, and the findings of the checks in those
            that can be read.
    """
    try:
        config = parse_args(args_defaults={"tokenizer_type": tokenizer_type, **(defaults or {})})
    except CommandLineError as wrong:
        if wrong.config is None:
            raise
        from megatron.initialize import with_findings_of_checks

        raise with_findings_of_checks(wrong, reads=task_of(wrong.config).reads) from None
    config = adapted(config)
    from megatron.training import pretrain

    pretrain(task_of(config), config)
