"""What a transition changes on one rank: the weights of its model, and the memory of its cache.

`prepare` does what can be undone and nothing else: new weights are read and checked beside the old
ones, a cache is copied beside itself. All ranks of an engine call these in the order of its log.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from megatron.errors import ConfigError
from megatron.scheduling.control.member import TaskKind
from megatron.scheduling.control.messages import Prepare
from megatron.scheduling.control.states import Mode, TransitionKind

LoadWeights = Callable[[str], nn.Module]


class SuspendableCache(Protocol):
    """A pool of blocks whose memory can be given back, such as `PagedCache`."""

    def saved(self, blocks: Sequence[int]) -> Tensor: ...

    def release(self) -> None: ...

    def restore(self, blocks: Sequence[int] = (), saved: Tensor | None = None) -> None: ...


class RankModel:
    """The model and the cache of one rank.

    Args:
        model: whose weights are exchanged in place.
        load: returns a model like it with the weights of a folder; None: it cannot be done.
        on_new_weights: called when they are in their place.
    """

    def __init__(
        self,
        model: nn.Module,
        cache: SuspendableCache,
        *,
        load: LoadWeights | None = None,
        on_new_weights: Callable[[], None] = lambda: None,
    ) -> None:
        self._model, self._cache, self._load = model, cache, load
        self._on_new_weights = on_new_weights
        self._loaded: nn.Module | None = None
        self._blocks: Sequence[int] = ()
        self._saved: Tensor | None = None
        self._is_released = False

    def do(self, part: TaskKind, prepare: Prepare, blocks: Sequence[int]) -> None:
        """Do one part of a transition; see the methods of its name."""
        if part is TaskKind.PREPARE:
            self.prepare(prepare, blocks)
        elif part is TaskKind.APPLY:
            self.apply(prepare)
        else:
            self.undo(prepare)

    def prepare(self, prepare: Prepare, blocks: Sequence[int]) -> None:
        """Begin a transition.

        Args:
            blocks: of the cache, whose content is needed later.

        Raises:
            MegatronError: it cannot be made; nothing has changed.
        """
        match prepare.transition:
            case TransitionKind.NEW_WEIGHTS:
                if self._load is None:
                    raise ConfigError(
                        "this engine cannot load other weights",
                        found=prepare.source,
                        fix="start the server again with them",
                    )
                self._loaded = self._load(prepare.source)
            case TransitionKind.SUSPEND if prepare.mode is Mode.OFFLOAD:
                self._blocks, self._saved = tuple(blocks), self._cache.saved(blocks)
            case TransitionKind.RESUME if self._is_released:
                self._cache.restore(self._blocks, self._saved)

    def undo(self, prepare: Prepare) -> None:
        """Undo what was prepared."""
        match prepare.transition:
            case TransitionKind.NEW_WEIGHTS:
                self._loaded = None
            case TransitionKind.SUSPEND:
                self._forget_saved()
            case TransitionKind.RESUME if self._is_released:
                self._cache.release()

    @torch.no_grad()
    def apply(self, prepare: Prepare) -> None:
        """Make the transition that was prepared."""
        match prepare.transition:
            case TransitionKind.NEW_WEIGHTS if self._loaded is not None:
                loaded, self._loaded = self._loaded.state_dict(), None
                for name, tensor in self._model.state_dict().items():
                    tensor.copy_(loaded.pop(name))
                self._on_new_weights()
            case TransitionKind.SUSPEND if prepare.mode is not Mode.KEEP:
                self._cache.release()
                self._is_released = True
            case TransitionKind.RESUME if self._is_released:
                self._is_released = False
                self._forget_saved()

    def _forget_saved(self) -> None:
        self._blocks, self._saved = (), None
