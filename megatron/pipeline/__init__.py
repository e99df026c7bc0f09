"""A model cut into stages: in which order each stage works, and what it sends to which other.

The order is data (`action.py`, `schedule.py`), made and proved here without torch or processes; an
executor only follows the list. Nothing here depends on layers, optimizers or checkpoints.
"""
