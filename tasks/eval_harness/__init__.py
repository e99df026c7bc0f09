"""EleutherAI's lm-eval-harness asks our models, through its public interface."""
