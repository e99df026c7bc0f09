"""Config files: YAML, JSON and TOML as flags, and a run's configuration as YAML."""
