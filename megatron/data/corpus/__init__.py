"""The files of a corpus: .bin/.idx, checksums, metadata, paths, and when files were verified."""
