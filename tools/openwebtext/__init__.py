"""Cleaning of web text before it is tokenized: near duplicates, and text of evaluation tasks."""
