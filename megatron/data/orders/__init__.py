"""Which sample comes when: sample maps, their caches on disk, and the lease of a builder."""
