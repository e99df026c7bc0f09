"""From datasets to batches: loaders, worker processes and the tensors of a batch."""
