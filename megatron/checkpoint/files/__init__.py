"""Files that are durable, verified while written and read, and run no code when opened."""
