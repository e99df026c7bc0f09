"""Writes a dense checkpoint as one of a model with experts, each a copy of the dense MLP.

    python tools/upcycle_checkpoint.py --load DENSE --save EXPERTS --num-experts 8

DENSE is of any format that this program reads. The result computes what the dense model does;
routers are drawn from the seed. It has no optimizer state: load it with --finetune, and with the
flags of the experts beside those of the dense model. Memory: one stack of experts. Exit code 66
when the checkpoint is damaged or cannot be the beginning of such a model.
"""

import argparse
import sys
from pathlib import Path

if __package__ in (None, ""):  # started as a file: its own folder is on the path, ours is not
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from torch import Tensor

from megatron.checkpoint.formats import registry
from megatron.checkpoint.source import SourceOptions, WriteOptions
from megatron.checkpoint.upcycle import UpcycledSource
from megatron.config.experts import RouterScoreFunction
from megatron.config.layer_pattern import EVERY_LAYER
from megatron.config.model import ModelConfig
from megatron.model import init
from megatron.program import run_program

_FLAGS = ("num_experts", "moe_router_topk", "moe_router_score_function", "moe_layer_freq")


def main() -> None:
    """Open the dense checkpoint, and write it with experts."""
    arguments = _arguments()
    form = registry.get(arguments.format)
    assert form.write is not None  # noqa: S101  # invariant: the parser knows the writable formats
    registry.refuse_overlap(arguments.load, arguments.save)

    def router(config: ModelConfig, name: str, shape: tuple[int, ...]) -> Tensor:
        return init.draw(init.weight_init(config), shape, seed=arguments.seed, name=name)

    options = SourceOptions(vocab_size=arguments.true_vocab_size)
    with registry.open_source(arguments.load, arguments.iteration, options=options) as source:
        flags = {name: getattr(arguments, name) for name in _FLAGS}
        upcycled = UpcycledSource(source, flags, router)
        upcycled.verify()
        written = form.write(upcycled, arguments.save, WriteOptions(optimizer=False))
    print(f"{arguments.num_experts} experts from each MLP: {written}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--load", type=Path, required=True, help="a --save folder, or one checkpoint's own")
    add("--iteration", type=int, help="iteration to read (default: the latest)")
    add("--save", type=Path, required=True, help="folder to write to, as --save of a run")
    add("--format", default="sharded", choices=registry.writable())
    add("--num-experts", type=int, required=True, help="experts of a layer")
    add("--moe-router-topk", type=int, default=2, help="experts that a token takes, 2 or more")
    add(
        "--moe-router-score-function",
        choices=tuple(one.value for one in RouterScoreFunction),
        default=RouterScoreFunction.SOFTMAX.value,
    )
    add("--moe-layer-freq", default=EVERY_LAYER, help="layers that get experts, as in a run")
    add("--seed", type=int, default=1234, help="seed of the routers, as in a run")
    add("--true-vocab-size", type=int, help="tokens, where the source does not mark padding rows")
    return parser.parse_args()


if __name__ == "__main__":
    run_program(main)
