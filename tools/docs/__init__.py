"""Pages of docs/ that are generated: one module for each, and one command that writes all."""
