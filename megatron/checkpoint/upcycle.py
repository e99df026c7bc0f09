"""A dense checkpoint as one of a model with experts, each of which is a copy of the MLP.

Where the shares of a token's experts sum to 1 such a model computes what the dense one did, and
begins to differ as it is trained (Komatsuzaki et al. 2022, arXiv 2212.05055). Routers are new.
There is no optimizer state to go with them, so a run can only begin from it.
"""

import re
from collections.abc import Callable, Mapping
from pathlib import Path

from torch import Tensor

from megatron.checkpoint.boxes import Box
from megatron.checkpoint.files.safetensors_io import dtype_of
from megatron.checkpoint.source import CheckpointSource, SourceBase, TensorDescription
from megatron.config.fields import from_plain, to_plain
from megatron.config.model import ModelConfig
from megatron.errors import CheckpointError, ConfigError
from megatron.json_values import JsonObject, JsonValue

_MLP = re.compile(r"^(model/layers\.(\d+)\.mlp\.)(fc[12]\.(?:weight|bias))$")
# What would make the model another one than the dense one, or has no weights to begin with.
_PLAIN: Mapping[str, JsonValue] = {
    "moe_router_pre_softmax": False,
    "moe_router_topk_scaling_factor": 1.0,
    "moe_router_enable_expert_bias": False,
    "moe_router_add_bias": False,
    "moe_shared_expert_intermediate_size": None,
    "moe_shared_expert_gate": False,
    "mlp_type": "standard",
    "expert_interval": None,
}

RouterInit = Callable[[ModelConfig, str, tuple[int, ...]], Tensor]
"""Returns initial values of a whole router: of the model, under the name, of the shape."""


class UpcycledSource(SourceBase):
    """The weights of a dense `source` with experts in place of its MLPs; progress is the source's.

    Args:
        flags: fields of `ModelConfig` as plain values: `num_experts`, and how they are chosen.
        router: see `RouterInit`; names are without `model/`.

    Raises:
        CheckpointError: the source cannot be the beginning of a model with experts.
        ConfigError: the flags make no sense.
    """

    format_name = "upcycled"

    def __init__(
        self, source: CheckpointSource, flags: Mapping[str, JsonValue], router: RouterInit
    ) -> None:
        self.directory: Path = source.directory
        self._source, self._router = source, router
        self._model = _with_experts(source, flags)
        self._tensors: dict[str, TensorDescription] = {}
        self._dense: dict[str, str] = {}  # name of a stack of experts to that of the matrix
        self._routers: set[str] = set()
        for name, known in source.tensors.items():
            if name.startswith("model/"):
                self._add(name, known)

    def _add(self, name: str, known: TensorDescription) -> None:
        found, experts = _MLP.match(name), self._model.num_experts or 1
        if found is None or not self._model.expert_layers[int(found[2])]:
            self._tensors[name] = known
            return
        router, stack = f"{found[1]}router.weight", f"{found[1]}experts.{found[3]}"
        if router not in self._routers:
            shape = (experts, self._model.hidden_size)
            self._tensors[router] = known._replace(global_shape=shape)
            self._routers.add(router)
        self._tensors[stack] = known._replace(global_shape=(experts, *known.global_shape))
        self._dense[stack] = name

    @property
    def tensors(self) -> Mapping[str, TensorDescription]:
        """The parameters; the optimizer's state is left behind."""
        return self._tensors

    @property
    def config(self) -> Mapping[str, JsonObject]:
        """The flags of the source, with those of the experts."""
        return {**self._source.config, "model": to_plain(self._model)}

    @property
    def kind(self) -> str:
        """The kind of model of the source."""
        return self._source.kind

    @property
    def progress(self) -> Mapping[str, int]:
        """The progress of the source."""
        return self._source.progress

    @property
    def scalars(self) -> JsonObject:
        """Empty: there is no optimizer."""
        return {}

    def read(self, name: str, box: Box) -> Tensor:
        """Return the elements `box` of the whole tensor `name`, in the dtype of the source."""
        if name in self._routers:
            known = self._tensors[name]
            whole = self._router(self._model, name.removeprefix("model/"), known.global_shape)
            return whole[box.slices].to(dtype_of(known.dtype_code))
        if name in self._dense:
            one = self._source.read(self._dense[name], Box(box.offset[1:], box.shape[1:]))
            return one.expand(box.shape).contiguous()
        return self._source.read(name, box)

    def verify(self, *, share: int = 0, of: int = 1) -> None:
        """Check the files of the source."""
        self._source.verify(share=share, of=of)


def _with_experts(source: CheckpointSource, flags: Mapping[str, JsonValue]) -> ModelConfig:
    """Return the model with experts that the flags make of the source's."""
    try:
        dense = from_plain(ModelConfig, source.config.get("model", {}))
    except ConfigError as error:
        raise CheckpointError(
            "the checkpoint does not say which model it is of",
            found=f"{source.directory}: {error.problem}; {error.found}",
            fix="begin with a checkpoint of a format that stores the flags of its model",
        ) from error
    if dense.has_experts:
        raise CheckpointError(
            "the model has experts already",
            found=f"{source.directory}: --num-experts {dense.num_experts}",
            fix="begin with a dense model",
        )
    # A width of experts that a dense model was given meant nothing.
    fields = {**to_plain(dense), **_PLAIN, "moe_ffn_hidden_size": dense.ffn_width, **flags}
    model = from_plain(ModelConfig, fields)
    if not model.has_experts or model.moe_router_topk < 2:
        raise ConfigError(
            "the shares of a token's experts sum to 1 where it takes two or more of them",
            found=f"--num-experts {model.num_experts}, --moe-router-topk {model.moe_router_topk}",
            fix="use --num-experts 8, --moe-router-topk 2, or other numbers above 1",
        )
    return model
