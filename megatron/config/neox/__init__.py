"""gpt-neox's YAML configs: what each of their keys means here, with neox's defaults."""
