"""Parts of the preprocessing programs: reading documents, encoding them, writing corpora."""
