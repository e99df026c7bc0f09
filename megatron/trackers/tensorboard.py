"""TensorBoard's event files, with the tags of Megatron-DeepSpeed.

Its pages have one horizontal axis, so most numbers are written again over samples and tokens.
"""

import json
from collections.abc import Mapping

from torch.utils.tensorboard import SummaryWriter

from megatron.progress import Progress
from megatron.trackers.tracker import TrackedRun

_BY_ITERATION = ("steps-vs-", "curriculum_seqlen", "time/", "iteration-time/")
_BY_TOKENS = ("lm-loss", "learning-rate")
_TURNED = {
    "steps-vs-samples/y=samples,x=steps": "steps-vs-samples/y=steps,x=samples",
    "steps-vs-tokens/y=tokens,x=steps": "steps-vs-tokens/y=steps,x=tokens",
}


class TensorBoard:
    """The event file of one start of a run."""

    def __init__(self, run: TrackedRun) -> None:
        """Begin a file; an earlier start's points from `first_iteration` on are hidden."""
        self._writer = SummaryWriter(  # type: ignore[no-untyped-call]
            run.logging.tensorboard_dir,
            max_queue=run.logging.tensorboard_queue_size,
            purge_step=run.first_iteration if run.first_iteration > 1 else None,
        )
        for title, values in run.configs.items():
            words = "```\n" + json.dumps(values, indent=1) + "\n```"
            self._writer.add_text(title, words)  # type: ignore[no-untyped-call]

    def log_scalars(self, values: Mapping[str, float], at: Progress) -> None:
        """Write each number at its iteration, and over samples and tokens where that is usual."""
        for tag, value in values.items():
            self._scalar(tag, value, at.iteration)
            if tag in _TURNED:
                self._scalar(_TURNED[tag], at.iteration, int(value))
            if not tag.startswith(_BY_ITERATION) or tag == "iteration-time/iteration-time":
                self._scalar(f"{tag} vs samples", value, at.consumed_samples)
            if tag.startswith(_BY_TOKENS) and not tag.endswith(" ppl"):
                self._scalar(f"{tag} vs tokens", value, at.consumed_tokens)
        if "iteration-time/samples per second" in values:  # with every line of the log
            self._writer.flush()  # type: ignore[no-untyped-call]

    def close(self) -> None:
        """End the file."""
        self._writer.close()  # type: ignore[no-untyped-call]

    def _scalar(self, tag: str, value: float, at: int) -> None:
        self._writer.add_scalar(tag, value, at)  # type: ignore[no-untyped-call]
