"""What stands around a training step: when to stop, what to report, what to distrust."""
