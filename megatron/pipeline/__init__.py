"""A model cut into stages: in which order each stage works, and what it sends to which other.

The order is data (`action.py`, `schedule.py`), made and proved here without torch or processes;
whoever runs it only does what the list says. Nothing here knows layers, optimizers or checkpoints.
"""
