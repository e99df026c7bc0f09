"""The training loop and its parts: what precedes and follows a step, data, stops, reports."""
