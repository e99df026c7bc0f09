"""A model's list of layers as DeepSpeed's `PipelineModule`, under our names and DeepSpeed's.

What a rank holds is a `PipelineStage`. Its modules are registered a second time by the numbers that
DeepSpeed's own checkpoints use; a tied module holds only what is shared, because DeepSpeed keeps
one stage's copy of all of it. Recomputation is our policy's business, so DeepSpeed's interval is 0.
Importing this module imports DeepSpeed: do so where a run asks for it.
"""

import re
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from deepspeed.pipe import LayerSpec as PipeSpec
from deepspeed.pipe import PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from torch import Tensor, nn

from megatron import device
from megatron.engine.cuts import StageCut
from megatron.errors import ConfigError
from megatron.model.init import initialize_parameters
from megatron.model.specs import Carry, LayerSpec
from megatron.model.stage import PipelineStage, parameters_of_layers, run_layers
from megatron.mpu.context import ParallelContext
from megatron.mpu.stage_plan import LayerRange

# Scripts for Megatron-DeepSpeed use type:transformer, and DeepSpeed matches this name.
_BLOCK_CLASS = "ParallelTransformerLayerPipe"


class LayersPipe(PipelineModule):  # type: ignore[misc]  # DeepSpeed has no types
    """The layers of one pipeline rank. All ranks construct it together.

    Args:
        loss: is given the last carry and the labels of a micro-batch on the last stage.
        seed: of the initial values, which are those of every other layout.
    """

    _specs: tuple[LayerSpec, ...]

    def __init__(
        self,
        specs: Sequence[LayerSpec],
        ctx: ParallelContext,
        *,
        cut: StageCut,
        seed: int,
        loss: Callable[[Carry, Carry], Tensor],
    ) -> None:
        # State of the methods below, which are called before the module is initialised.
        self.__dict__.update(_specs=tuple(specs), _ctx=ctx, _cut=cut, _seed=seed)
        grid = ctx.topology
        super().__init__(
            [_pipe_spec(spec) for spec in specs],
            topology=PipeModelDataParallelTopology(grid.pp, grid.tp, grid.dp),
            loss_fn=loss,
            partition_method=cut.method or "uniform",
        )
        # Its own have no timeout but torch's, and a second communicator costs memory on GPUs.
        self._grid.__dict__.update(
            ds_model_proc_group=ctx.model.handle,
            dp_proc_group=ctx.dp.handle,
            pp_proc_group=ctx.pp.handle,
            slice_proc_group=ctx.tp.handle,
        )

    @property
    def stage(self) -> PipelineStage:
        """The layers of this rank under their global names."""
        stage: PipelineStage = vars(self)["_stage"]
        return stage

    @property
    def ranges(self) -> tuple[LayerRange, ...]:
        """The layers of every stage."""
        return tuple(LayerRange(start, stop) for start, stop in pairwise(self.parts))

    def forward(self, carry: Carry) -> Carry:
        """Run the layers of this rank under the run's policy for saved activations."""
        start, stop = self.ranges[self.stage_id]
        result = run_layers(self.stage, self._specs[start:stop], carry)
        return tuple(tensor.contiguous() for tensor in result)  # as messages have to be

    def train(self, mode: bool = True) -> "LayersPipe":
        """Set training or evaluation, also for the root of our names, which is no child."""
        super().train(mode)
        self.stage.train(mode)
        return self

    def _partition_layers(self, method: str = "uniform") -> None:
        given: tuple[LayerRange, ...] | None = vars(self)["_cut"].ranges
        if given is None:
            super()._partition_layers(method=method)
        else:
            self.parts = [0, *(stop for _, stop in given)]
        self.parts = [int(cut) for cut in self.parts]  # numpy's, of some methods
        here = self._topo.get_coord(self.global_rank).pipe
        self._set_bounds(start=self.parts[here], stop=self.parts[here + 1])

    def _synchronize_tied_weights(self) -> None:
        with torch.no_grad():  # or torch warns at every backward pass
            super()._synchronize_tied_weights()

    def _count_layer_params(self) -> list[int]:
        # DeepSpeed would build the whole model on every rank to count.
        return list(parameters_of_layers(self._specs))

    def _find_layer_type(self, layername: str) -> list[int]:
        names = class_names(self._specs)
        found = [at for at, name in enumerate(names) if re.search(layername, name, re.IGNORECASE)]
        if not found:
            raise ConfigError(
                "no layer is of the type that pipeline stages are to have equally many of",
                found=f"--pp-partition-method type:{layername}; layers are of types "
                + ", ".join(dict.fromkeys(names)),
                fix="use type:transformer",
            )
        return found

    def _build(self) -> None:
        start, stop = self.ranges[self.stage_id]
        with torch.device(device.current()):
            stage = PipelineStage(self._specs, (LayerRange(start, stop),))
        initialize_parameters(stage, seed=vars(self)["_seed"], ctx=vars(self)["_ctx"])
        self.__dict__["_stage"] = stage  # not as a child: its modules are children already
        for at in range(start, stop):
            spec = self._specs[at]
            module = stage.get_submodule(spec.name)
            if spec.tied is not None:
                shared = stage.get_submodule(spec.tied)
                # First, so that shared parameters have this name and not the layer's.
                self.tied_modules[_key(spec.tied)] = shared
                self.tied_weight_attrs[_key(spec.tied)] = [n for n, _ in shared.named_parameters()]
            if spec.tied == spec.name:
                self.forward_funcs.append(getattr(module, spec.call))  # has no file of its own
                continue
            self.fwd_map[str(at)] = len(self.forward_funcs)
            self.forward_funcs.append(module)
            self.add_module(str(at), module)
        for parameter in self.parameters():
            parameter.ds_pipe_replicated = False


def class_names(specs: Sequence[LayerSpec]) -> tuple[str, ...]:
    """Return the class names by which type:REGEX finds layers."""
    return tuple(_BLOCK_CLASS if spec.block else _camel(spec.name) + "Pipe" for spec in specs)


def _pipe_spec(spec: LayerSpec) -> PipeSpec:
    (name,) = class_names([spec])
    kind = type(name, (nn.Module,), {})  # a name alone: `_build` makes the layers
    return PipeSpec(kind) if spec.tied is None else TiedLayerSpec(_key(spec.tied), kind)


def _camel(name: str) -> str:
    return "".join(word.capitalize() for word in re.split(r"[._]", name) if not word.isdigit())


def _key(tied: str) -> str:
    return tied.replace(".", "_")  # the name of a module has no dots
