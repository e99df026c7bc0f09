"""The engine that trains through DeepSpeed. Only this package imports `deepspeed`."""
