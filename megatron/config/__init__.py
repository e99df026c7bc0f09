"""What a run is asked to do, as frozen values; imports neither torch nor numpy."""
