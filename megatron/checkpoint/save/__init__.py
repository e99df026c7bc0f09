"""The steps of a save, while training waits or beside it."""
