"""The configuration of a run, as frozen values; imports neither torch nor numpy."""
