"""From nothing to a trained and sampled GPT: what `make pretrain` runs, step by step.

Each step is a command that a user could type, is shown as one, and is passed over when what it
makes is already there; so a second run resumes an interrupted training, or says that it is done.
Without --data the corpus is the Python standard library's own text, so nothing is downloaded.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron import device, log
from megatron.atomic import publish, temporary_name
from megatron.checkpoint.load import storage
from megatron.data.corpus.paths import data_file_path, index_file_path
from megatron.errors import ConfigError, DataError
from megatron.program import run

VOCAB_SIZE = 1024
SEQ_LENGTH = 256
# A GPT of a million parameters, which two CPU cores train in minutes: few tokens, so that each is
# seen often, and rotary positions, which are learnt faster than a table of them.
MODEL = (
    "--num-layers 4 --hidden-size 128 --num-attention-heads 4 --position-embedding-type rope "
    f"--seq-length {SEQ_LENGTH} --hidden-dropout 0 --attention-dropout 0"
).split()
TRAINING = (
    "--micro-batch-size 4 --global-batch-size 8 --train-iters {iters} --lr 5e-3 --min-lr 2e-4 "
    "--lr-decay-style cosine --lr-warmup-fraction 0.05 --weight-decay 0.1 --adam-beta2 0.95 "
    "--clip-grad 1.0 --eval-at-start --eval-interval {interval} --eval-iters 16 "
    "--log-interval 25 --save-interval {interval} --keep-last 2 --split 90,5,5 --num-workers 0 "
    "--seed 1234"
)
DEFAULT_ITERATIONS = 900
CHECKPOINTS = 6  # in one run, each with an evaluation
PROMPTS = {True: "def ", False: "The "}  # by whether the corpus is the default one


@dataclass(frozen=True, slots=True)
class Places:
    """Where each step of one run puts what it makes."""

    root: Path

    @property
    def corpus(self) -> Path:
        """The default corpus."""
        return self.root / "corpus.jsonl"

    @property
    def tokenizer(self) -> Path:
        """Folder of vocab.json and merges.txt."""
        return self.root / "tokenizer"

    @property
    def prefix(self) -> Path:
        """What --data-path takes."""
        return self.root / "data" / "corpus_text_document"

    @property
    def source(self) -> Path:
        """What the user's text was when the run began."""
        return self.root / "source.json"

    @property
    def checkpoints(self) -> Path:
        """What --save and --load take."""
        return self.root / "checkpoints"

    @property
    def events(self) -> Path:
        """TensorBoard's folder."""
        return self.root / "tensorboard"

    @property
    def picture(self) -> Path:
        """The loss curve."""
        return self.root / "loss.png"

    @property
    def sample(self) -> Path:
        """Text written by the trained model."""
        return self.root / "sample.txt"


def main(argv: Sequence[str] | None = None) -> None:
    """Do every step that is not done yet, then say where everything is."""
    flags = _parse(argv)
    if flags.data is not None and not flags.data.exists():
        raise ConfigError(
            "the text to train on does not exist",
            found=f"DATA={flags.data}",
            fix="give a .txt, .jsonl or .jsonl.zst file, or a folder of them",
        )
    name = "python-library" if flags.data is None else flags.data.name.split(".")[0]
    places = Places(flags.out or Path("runs") / name)
    places.root.mkdir(parents=True, exist_ok=True)
    if flags.data is not None:
        refuse_changed_text(places.source, flags.data)
    done = _trained_iterations(places)
    if done >= flags.iterations and places.sample.exists():
        print(f"Training is done: {done} of {flags.iterations} iterations are in {places.root}.")
        print(f"To start over, remove that folder; to train on, add ITERATIONS={2 * done}.")
        _farewell(places, flags.data)
        return
    started = time.monotonic()
    if done:
        print(f"Resuming {places.root} after {done} of {flags.iterations} iterations.")
    _prepare(places, flags.data)
    command = training_command(
        places, iterations=flags.iterations, ranks=_ranks(), extra=flags.training_flags
    )
    _step(f"pretrain a GPT on {_ranks()} ranks", command)
    _step(
        "draw the loss curve",
        _tool(
            "plot_loss",
            *("--tensorboard-dir", places.events, "--output", places.picture),
            *("--title", f"{name}, {flags.iterations} iterations"),
        ),
    )
    prompt = PROMPTS[flags.data is None]
    command = _tool(
        "generate_text",
        *("--load", places.checkpoints, "--prompt", prompt, "--output", places.sample),
        *("--num-samples", 2, "--num-tokens", 120, "--temperature", 0.8, "--top-k", 40),
        *("--seed", 1),
    )
    _step("sample from the checkpoint", command)
    print(f"\nAll of it took {(time.monotonic() - started) / 60:.1f} minutes.")
    _farewell(places, flags.data)


def refuse_changed_text(record: Path, data: Path) -> None:
    """Note which files the text is, or raise if they are not those that a run here began with.

    Tokens, tokenizer and model of a folder belong to one text; another would be passed over.
    """
    files = [data] if data.is_file() else sorted(path for path in data.rglob("*") if path.is_file())
    stats = {str(path.resolve()): path.stat() for path in files}
    now = {name: [stat.st_size, stat.st_mtime_ns] for name, stat in stats.items()}
    before = json.loads(record.read_text()) if record.exists() else now
    if now != before:
        changed = sorted(name for name in {*now, *before} if now.get(name) != before.get(name))
        raise DataError(
            "the text is not the one that this run began with",
            found=f"{', '.join(changed[:3])}{' ...' if len(changed) > 3 else ''} "
            f"changed since {record} was written",
            fix="give another folder with OUT=..., or remove this one to start over",
        )
    unfinished = temporary_name(record)
    unfinished.write_text(json.dumps(now, indent=1))
    publish(unfinished, record)


def training_command(
    places: Places, *, iterations: int, ranks: int, extra: Sequence[str] = ()
) -> list[str]:
    """Return the pretraining as a user would type it; of flags given twice, `extra` wins."""
    interval = max(iterations // CHECKPOINTS, 1)
    return [
        *_torchrun(ranks),
        "pretrain_gpt.py",
        *MODEL,
        *TRAINING.format(iters=iterations, interval=interval).split(),
        *("--data-path", str(places.prefix)),
        *("--tokenizer-type", "GPT2BPETokenizer"),
        *("--vocab-file", str(places.tokenizer / "vocab.json")),
        *("--merge-file", str(places.tokenizer / "merges.txt")),
        *("--save", str(places.checkpoints), "--load", str(places.checkpoints)),
        *("--tensorboard-dir", str(places.events)),
        *extra,
    ]


def _prepare(places: Places, data: Path | None) -> None:
    """Corpus, tokenizer and .bin/.idx, as far as they are not there yet."""
    source = data or places.corpus
    if data is None and not places.corpus.exists():
        command = _tool("make_corpus", "--output", places.corpus)
        _step("gather the text of Python's standard library", command)
    # Paragraphs are the documents of a plain text, so that some can be held out for validation.
    rule = ["--text-documents", "paragraphs"]
    if not (places.tokenizer / "merges.txt").exists():
        size = ["--vocab-size", str(VOCAB_SIZE)]
        command = _tool(
            "train_tokenizer", "--input", source, "--output", places.tokenizer, *size, *rule
        )
        _step("train a byte-level BPE tokenizer", command)
    prefix = str(places.prefix)
    if not (Path(data_file_path(prefix)).exists() and Path(index_file_path(prefix)).exists()):
        places.prefix.parent.mkdir(exist_ok=True)
        command = _tool(
            "preprocess_data",
            *("--input", source, "--tokenizer-type", "GPT2BPETokenizer"),
            *("--vocab-file", places.tokenizer / "vocab.json"),
            *("--merge-file", places.tokenizer / "merges.txt"),
            *("--output-prefix", prefix.removesuffix("_text_document")),
            *("--append-eod", "--workers", str(len(os.sched_getaffinity(0)))),
            *rule,
        )
        _step("turn the text into .bin/.idx", command)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="first_run", description=__doc__)
    parser.add_argument("--data", type=Path, help="your own text: a file or a folder")
    parser.add_argument("--out", type=Path, help="folder for everything [runs/<name of the data>]")
    parser.add_argument(
        "--iterations",
        type=int,
        default=DEFAULT_ITERATIONS,
        help=f"how long to train [{DEFAULT_ITERATIONS}]",
    )
    parser.add_argument(
        "training_flags",
        nargs="*",
        metavar="-- FLAG",
        help="after --: flags for pretrain_gpt.py that win over those chosen here, such as "
        "`-- --num-layers 8`; give them from the first start of a folder on",
    )
    return parser.parse_args(argv)


def _ranks() -> int:
    """Return two processes: on the CPU, or on GPUs where there are that many."""
    return min(2, device.device_count()) if device.cuda_is_available() else 2


def _torchrun(ranks: int) -> list[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [*launcher, "--nproc-per-node", str(ranks)]


def _tool(name: str, *arguments: object) -> list[str]:
    return [sys.executable, "-m", f"tools.{name}", *map(str, arguments)]


def _step(title: str, command: Sequence[str]) -> None:
    """Show a command and run it; its failure ends the whole run with its own status."""
    shown = shlex.join(["python" if word == sys.executable else word for word in command])
    print(f"\n=== {title}\n$ {shown}", flush=True)
    # One thread per rank: more of them fight over the cores that the ranks share.
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "true"}
    started = time.monotonic()
    process = subprocess.Popen(command, env=environment)
    try:
        process.wait()
    except KeyboardInterrupt:
        process.wait()  # the terminal interrupts it too, and it has to end its own ranks
        raise
    if process.returncode:
        log.error(f"the step '{title}' failed; its message stands above")
        raise SystemExit(process.returncode)
    print(f"--- {time.monotonic() - started:.0f} s", flush=True)


def _trained_iterations(places: Places) -> int:
    if storage.never_held_a_checkpoint(places.checkpoints):
        return 0
    return storage.latest_iteration(places.checkpoints)


def _farewell(places: Places, data: Path | None) -> None:
    prompt = PROMPTS[data is None]
    print(
        f"\nWhere everything is:\n"
        f"  tokens       {places.prefix}.bin, .idx\n"
        f"  tokenizer    {places.tokenizer}\n"
        f"  checkpoints  {places.checkpoints}\n"
        f"  TensorBoard  {places.events}\n"
        f"  loss curve   {places.picture}\n"
        f"  a sample     {places.sample}\n"
        f"\nTry next:\n"
        f"  .venv/bin/python -m tools.generate_text --load {places.checkpoints} "
        f"--prompt {shlex.quote(prompt)} --num-tokens 200\n"
        f"  .venv/bin/tensorboard --logdir {places.events}\n"
        f"  make pretrain DATA=my.txt"
    )


if __name__ == "__main__":
    run(main)
