"""Where the numbers of a run are recorded: TensorBoard, and services that are each optional."""
