"""How fast text is generated, beside what else."""
