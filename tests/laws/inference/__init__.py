"""What the engine generates and scores, in any company."""
