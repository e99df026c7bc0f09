"""The HTTP server of text generation: OpenAI's interface, Megatron's `PUT /api`, and a page."""
