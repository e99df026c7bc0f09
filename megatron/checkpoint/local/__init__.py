"""Local checkpoints: each rank's state in a folder of its own node, with a copy on a neighbour."""
