"""What a run will keep, compute and send on ranks that are not there: its own code on `meta`."""
