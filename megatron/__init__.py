"""megatron-verified: Megatron-style pretraining in which nothing is taken for granted.

Importing this package imports nothing else: the familiar names below are looked up on first use
(PEP 562), so that `--help` and tools that only read flags never wait for torch.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_LAZY = {
    "get_args": "megatron.global_vars",
    "get_timers": "megatron.global_vars",
    "get_tokenizer": "megatron.global_vars",
    "initialize_megatron": "megatron.initialize",
    "pretrain": "megatron.training",
}

__all__ = ["__version__", *_LAZY]  # noqa: PLE0604


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'megatron' has no attribute {name!r}")
