"""The engine behind the server: requests as it takes them, its thread, and the model in it."""
