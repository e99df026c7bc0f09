"""Fine-tune a decoder on pairs whose inputs it sees in both directions, as T0 (arXiv 2110.08207).

`torchrun --nproc-per-node N finetune_t0_non_causal_decoder.py <flags>`, or `python`. The pairs are
those of --mtf, packed into rows; each sees nothing of the others, and only targets are learned.
--load with --finetune takes the weights of a prefix LM or of a GPT.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron.command import pretrain_from_flags
from megatron.program import run_program
from pretrain_prefix_lm import TOKENIZER_TYPE, prefix_lm_task

if TYPE_CHECKING:
    from megatron.engine.base import PretrainTask

DEFAULTS = {"mtf": True}  # of flags that the command line does not give


def program() -> None:
    """Train, and end with the exit status of the outcome; also installed as a command."""
    run_program(main)


def main() -> None:
    """Read the flags, then train."""
    pretrain_from_flags(lambda _: t0_task(), tokenizer_type=TOKENIZER_TYPE, defaults=DEFAULTS)


def t0_task() -> PretrainTask:
    """Return the task of a prefix LM on pairs alone."""
    from megatron.data.kinds.program_data import PAIRS_DATA

    return prefix_lm_task(PAIRS_DATA)


if __name__ == "__main__":
    program()
