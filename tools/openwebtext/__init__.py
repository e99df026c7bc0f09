"""Cleaning of web text before it is tokenized: URLs, documents, near duplicates, tasks."""
