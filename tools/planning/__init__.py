"""Parts of the programs that plan a run on ranks that are not there."""
