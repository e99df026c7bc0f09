"""Fine-tuning: epochs over examples, judged after each one, the best kept in --save.

The loop, engines, schedules and checkpoints are those of pretraining. What is here is which
examples a step reads and what is kept of the scores (`epochs.py`), and where saves go.
"""

import hashlib
from dataclasses import dataclass
from functools import partial

from megatron.checkpoint.load import storage
from megatron.checkpointing import load_checkpoint, save_checkpoint
from megatron.config.run import RunConfig
from megatron.engine.build import build_engine
from megatron.errors import CheckpointError
from megatron.global_vars import Runtime
from megatron.lengths import batch_schedule
from megatron.loop.hooks import SaveCheckpoints
from megatron.loop.startup import agree_on_files
from megatron.loop.training_loop import training_loop
from megatron.model_build import model_build
from megatron.mpu.context import ParallelContext
from megatron.peers.activity import EVALUATION, SAVE
from megatron.progress import Duration, Progress
from tasks.finetune.epochs import EpochBatches, JudgeEpochs
from tasks.finetune.examples import ClassificationQuestion
from tasks.finetune.judging import EvaluationFile, EvaluationResult, evaluate_examples
from tasks.finetune.rows import Rows
from tasks.finetune.start import Start, StartKind, best_to_load, last_to_save
from tasks.finetune.task import task_of


@dataclass(frozen=True)
class FineTuningResult:
    """The outcome of a fine-tuning.

    Attributes:
        best: the best epoch's scores of the validation data.
        losses: mean training loss of each epoch of this process, over what it trained of it.
        stopped: why it ended before its last epoch; None when it is complete.
    """

    best: EvaluationResult
    best_epoch: int
    losses: tuple[float, ...]
    stopped: str | None = None


class FineTuning:
    """A classifier on this rank, and its start. All ranks use it together."""

    def __init__(
        self, config: RunConfig, runtime: Runtime, question: ClassificationQuestion, start: Start
    ) -> None:
        self._config, self._runtime, self._question = config, runtime, question
        self._start = start
        self._context: ParallelContext = runtime.context
        self._batches = batch_schedule(config, self._context.dp.size)
        self._build, task = model_build(runtime), task_of(question)
        self._engine = build_engine(config, task, self._build, runtime.tokenizer, runtime.timers)
        if start.kind is not StartKind.RESUMED:
            self._load(config)

    def judge(self, rows: Rows) -> EvaluationResult:
        """Score every example with the present model."""
        size = self._config.training.micro_batch_size
        with self._runtime.activity.during(EVALUATION):
            return evaluate_examples(
                self._engine, rows, self._question, self._context, micro_batch_size=size
            )

    def train(
        self, rows: Rows, valid: Rows, parts: tuple[EvaluationFile, ...], *, epochs: int
    ) -> FineTuningResult:
        """Train, and evaluate after each epoch; --save holds the best epoch so far.

        Args:
            parts: the files of `valid`, each of which is judged by itself too.
        """
        config, runtime, context = self._config, self._runtime, self._context
        sources = {"examples to train on": _digest_of(rows)}
        compared = sources | {"examples to judge by": _digest_of(valid)}
        agree_on_files(config.checkpoint.save, compared, runtime.launch, context)
        batch_size = self._batches.global_batch_size
        batches = EpochBatches(rows, config.training, context.dp, global_batch_size=batch_size)
        save_best = partial(self._save, config, sources)
        judging = JudgeEpochs(self._question, valid, parts, batches, epochs, self.judge, save_best)
        progress = Progress()
        if self._start.kind is StartKind.RESUMED:
            self._judge_best_so_far(judging)
            progress = self._load(config, sources)
            _check_batches(progress, batch_size)
        duration = Duration(self._batches, train_iters=epochs * batches.per_epoch)
        with training_loop(
            self._engine,
            config,
            self._build,
            duration,
            progress,
            runtime.timers,
            runtime.run_name,
            runtime.activity,
        ) as loop:
            progress, reason = loop.train(
                progress,
                batches,
                (judging,),
                SaveCheckpoints(
                    partial(self._save_last, sources),
                    batches.per_epoch,
                    config.checkpoint.save_interval,
                    also=config.checkpoint.extra_save_iters,
                    saved_iteration=progress.iteration,
                ),
            )
        stopped = None if duration.is_done(progress) else reason
        best = judging.best or self.judge(valid)
        return FineTuningResult(best, judging.best_epoch, judging.losses, stopped)

    def _load(self, config: RunConfig, sources: dict[str, str] | None = None) -> Progress:
        return load_checkpoint(config, self._engine, self._runtime, sources or {})

    def _judge_best_so_far(self, judging: JudgeEpochs) -> None:
        """Evaluate the best epoch in the resumed folder, if there is one."""
        config = best_to_load(self._config)
        save = config.checkpoint.save or ""
        if not storage.never_held_a_checkpoint(save):
            self._load(config)
            judging.best = self.judge(judging.valid)
            judging.best_epoch = storage.latest_iteration(save) // judging.batches.per_epoch

    def _save(self, config: RunConfig, sources: dict[str, str], progress: Progress) -> None:
        with self._runtime.activity.during(SAVE):
            save_checkpoint(config, self._engine, progress, self._runtime, sources)

    def _save_last(self, sources: dict[str, str], progress: Progress) -> None:
        """Save the state to resume from, if there is a folder and the optimizer is saved."""
        flags = self._config.checkpoint
        if flags.save is not None and flags.save_optim:
            self._save(last_to_save(self._config), sources, progress)


def _check_batches(progress: Progress, global_batch_size: int) -> None:
    """Raise CheckpointError if the batch size has changed, since progress counts batches."""
    if progress.consumed_samples != progress.iteration * global_batch_size:
        raise CheckpointError(
            "an interrupted fine-tuning goes on with batches of the size that it began with",
            found=f"{progress.consumed_samples} samples in {progress.iteration} iterations, and "
            f"{global_batch_size} in each here",
            fix="give --global-batch-size as it was "
            f"({progress.consumed_samples / max(1, progress.iteration):g})",
        )


def _digest_of(rows: Rows) -> str:
    """Return a digest of the examples, to compare two runs or two ranks."""
    digest = hashlib.sha256()
    for tensor in (rows.text, rows.types, rows.labels):
        digest.update(tensor.numpy().tobytes())
    return f"{len(rows)} examples, sha256 {digest.hexdigest()[:16]}"
