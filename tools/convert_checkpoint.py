"""Rewrites a checkpoint of any known format in another one, tensor by tensor, without a job.

    python tools/convert_checkpoint.py --load FROM --save TO --format megatron \
        --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2

FROM is a --save folder, or one checkpoint's own folder: sharded (ours), Megatron-LM and Megatron
core's torch_dist, DeepSpeed and its universal form, or Hugging Face. Needs memory for the largest
tensor, or for one file where a format keeps many in one. Exit code 66 when the checkpoint is
missing, damaged or cannot be written in the other format.
"""

import argparse
import re
import sys
from pathlib import Path

if __package__ in (None, ""):  # started as a file: its own folder is on the path, ours is not
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron import log
from megatron.checkpoint.formats import registry
from megatron.checkpoint.source import SourceOptions, WriteOptions
from megatron.config.checkpoint import MegatronNames
from megatron.errors import CheckpointError, ConfigError
from megatron.program import run_program
from tools.compare_with_transformers import check_export

# The value of the flag, and the name in safetensors files.
_DTYPES = {"fp32": "F32", "bf16": "BF16", "fp16": "F16"}


def main() -> None:
    """Read the arguments, open the source, and write it in the other format."""
    arguments = _arguments()
    _check(arguments)
    form = registry.get(arguments.format)
    if form.write is None:
        raise CheckpointError(
            "checkpoints of this format are read, not written",
            found=f"--format {form.name}",
            fix="use one of " + ", ".join(registry.writable()),
        )
    options = SourceOptions(vocab_size=arguments.true_vocab_size)
    with registry.open_source(arguments.load, arguments.iteration, options=options) as source:
        weights = sum(name.startswith("model/") for name in source.tensors)
        state = len(source.tensors) - weights
        log.info(
            f"{source.directory}: format {source.format_name}, {weights} parameters, "
            f"{state} tensors of optimizer state"
        )
        if not arguments.no_verify:
            source.verify()
        written = form.write(
            source,
            arguments.save,
            WriteOptions(
                tensor_model_parallel_size=arguments.tensor_model_parallel_size,
                pipeline_model_parallel_size=arguments.pipeline_model_parallel_size,
                virtual_stages=arguments.num_virtual_stages_per_pipeline_rank,
                megatron_names=arguments.megatron_names,
                make_vocab_size_divisible_by=arguments.make_vocab_size_divisible_by,
                optimizer=not arguments.no_optim,
                tokenizer=arguments.tokenizer,
                copy_tokenizer=not arguments.no_copy_tokenizer,
                dtype=None if arguments.dtype is None else _DTYPES[arguments.dtype],
                family=arguments.family,
                max_shard_bytes=_bytes(arguments.max_shard_size),
            ),
        )
        if form.for_transformers and not arguments.no_check_logits:
            check_export(source, written)
    print(f"converted {source.format_name} to {form.name}: {written}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--load", type=Path, required=True, help="a --save folder, or one checkpoint's own")
    add("--save", type=Path, required=True, help="folder to write to, as --save of a run")
    add("--format", required=True, help="one of " + ", ".join(registry.writable()))
    add("--iteration", type=int, help="iteration to read (default: the latest)")
    add(
        "--tensor-model-parallel-size", type=int, default=1, help="for formats with one file a rank"
    )
    add("--pipeline-model-parallel-size", type=int, default=1, help="the same")
    add("--num-virtual-stages-per-pipeline-rank", type=int, default=1, help="the same")
    add(
        "--megatron-names",
        choices=tuple(MegatronNames),
        type=MegatronNames,
        default=MegatronNames.LEGACY,
        help="megatron: names for its forks (legacy), for current Megatron-LM (core), or for its "
        "--transformer-impl local (core-local)",
    )
    add("--make-vocab-size-divisible-by", type=int, default=128, help="padding of the vocabulary")
    add("--true-vocab-size", type=int, help="tokens, where the source does not mark padding rows")
    add("--tokenizer", type=Path, help="folder of tokenizer files to put beside the weights")
    add("--no-copy-tokenizer", action="store_true", help="huggingface: weights and config alone")
    add("--dtype", choices=tuple(_DTYPES), help="huggingface: round the weights (default: keep)")
    add("--family", help="huggingface: model_type (default: the first that fits the model)")
    add("--max-shard-size", help="huggingface: bytes of one file, such as 500MB (default: 5GB)")
    add(
        "--no-check-logits",
        action="store_true",
        help="huggingface: do not compare the logits of the export with those of this program, "
        "which takes memory for the model twice",
    )
    add("--no-optim", action="store_true", help="leave the optimizer's state out")
    add("--no-verify", action="store_true", help="do not check the files of the source first")
    return parser.parse_args()


def _bytes(size: str | None) -> int | None:
    """Return the number of bytes in a text: 500MB, 5GB, 1000."""
    if size is None:
        return None
    found = re.fullmatch(r"(\d+)(KB|MB|GB|)", size)
    if found is None or int(found[1]) < 1:
        raise ConfigError(
            "a size of files cannot be read", found=f"--max-shard-size {size}", fix="use 5GB, 500MB"
        )
    return int(found[1]) * {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}[found[2]]


def _check(arguments: argparse.Namespace) -> None:
    for name in (
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
        "num_virtual_stages_per_pipeline_rank",
        "make_vocab_size_divisible_by",
    ):
        value = getattr(arguments, name)
        if value < 1:
            raise ConfigError(
                "a size is not positive",
                found=f"--{name.replace('_', '-')} {value}",
                fix="use 1 or more",
            )
    registry.refuse_overlap(arguments.load, arguments.save)


if __name__ == "__main__":
    run_program(main)
