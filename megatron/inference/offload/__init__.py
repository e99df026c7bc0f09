"""Models larger than the memory they compute in: where layers lie, and how they come."""
