"""Records which operators of torch and of ours a block of code calls."""

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class Operators(TorchDispatchMode):
    """A context manager; `names` are those of the operators called in it, "namespace::name"."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note the operator, and call it."""
        self.names.add(func._schema.name)
        return func(*args, **(kwargs or {}))
