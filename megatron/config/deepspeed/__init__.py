"""DeepSpeed's JSON file: its keys, and how they agree with the flags of a run."""
