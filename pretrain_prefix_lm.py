"""Pretrain a prefix LM: `torchrun --nproc-per-node N pretrain_prefix_lm.py <flags>`, or `python`.

It is a GPT whose first tokens all see each other: of a row, or with --reset-attention-mask of each
document in it. What differs from `pretrain_gpt.py` is here: datasets and batch of the task.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron.command import pretrain_from_flags
from megatron.program import run_program

if TYPE_CHECKING:
    from megatron.data.kinds.program_data import ProgramData
    from megatron.engine.base import PretrainTask


# As for a GPT: scripts name no tokenizer where it is GPT-2's.
TOKENIZER_TYPE = "GPT2BPETokenizer"


def program() -> None:
    """Train, and end with the exit status of the outcome; also installed as a command."""
    run_program(main)


def main() -> None:
    """Read the flags, then train."""
    pretrain_from_flags(lambda _: prefix_lm_task(), tokenizer_type=TOKENIZER_TYPE)


def prefix_lm_task(reads: ProgramData | None = None) -> PretrainTask:
    """Return the task of a prefix LM: the layers and the loss of a GPT, on rows with prefixes.

    Args:
        reads: the data; None: those of this program.
    """
    from dataclasses import replace

    from megatron.checkpoint.model_kind import PREFIX_LM
    from megatron.data.kinds.program_data import PREFIX_DATA
    from megatron.data.loading.prefix_batch import prefix_lm_batch
    from megatron.engine.base import BatchOptions, MicroBatch, RawBatch
    from megatron.engine.datasets import datasets_of
    from megatron.model.gpt_model import gpt_carry
    from pretrain_gpt import gpt_task

    def batch(raw: RawBatch, options: BatchOptions) -> MicroBatch:
        """Return the loader's batch as the arguments of the model and of the loss."""
        cut = prefix_lm_batch(raw, options.data, eod=options.tokenizer.eod)
        return MicroBatch(
            inputs=gpt_carry(cut.tokens, cut.position_ids, cut.document_ids, cut.is_prefix),
            labels=(cut.labels, cut.loss_mask),
        )

    reads = reads or PREFIX_DATA
    return replace(
        gpt_task(), name=PREFIX_LM, reads=reads, datasets=datasets_of(reads), batch=batch
    )


if __name__ == "__main__":
    program()
