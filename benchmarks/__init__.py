"""How fast training is, measured beside a plain peer and against stated peaks; see README.md."""
