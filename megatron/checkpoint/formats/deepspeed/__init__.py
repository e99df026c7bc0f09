"""DeepSpeed's layouts: `global_stepN` folders and universal checkpoints."""
