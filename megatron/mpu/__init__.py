"""Parallel groups, and the layers and collectives that use them.

`from megatron import mpu` gives user code Megatron's accessor names (`mpu.get_data_parallel_rank()`
and so on), looked up on first use. Code inside the package imports `megatron.mpu.<module>`.
"""

from importlib import import_module
from typing import Any


def __getattr__(name: str) -> Any:
    # Only the facade's own functions: its imports are no part of this package's interface.
    if name.startswith(("get_", "is_", "initialize_", "destroy_", "model_parallel_")):
        facade = import_module("megatron.mpu.initialize")
        if name in vars(facade):
            return vars(facade)[name]
    raise AttributeError(f"module 'megatron.mpu' has no attribute {name!r}")
