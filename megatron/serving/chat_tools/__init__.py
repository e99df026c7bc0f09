"""Tools of chats: what a template writes of them, and the calls in what a model answers."""
