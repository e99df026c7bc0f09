"""Our models as models of EleutherAI's lm-eval-harness, through its public interface."""
