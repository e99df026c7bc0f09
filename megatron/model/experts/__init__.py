"""The feed-forward half of a layer with experts: which a token takes, and what they compute."""
