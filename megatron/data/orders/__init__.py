"""The order of samples: sample maps, their caches on disk, and the lease of a builder."""
