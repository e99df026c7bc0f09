"""Programs around training: each runs as `python tools/NAME.py` and as `python -m tools.NAME`."""
