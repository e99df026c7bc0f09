"""Command-line flags that several tools share."""
