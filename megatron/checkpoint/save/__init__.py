"""The steps of a save, while training waits or in the background."""
