"""Models that retrieve: questions and blocks of text as vectors of one space."""
