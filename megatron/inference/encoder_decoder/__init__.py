"""Text generation by models with an encoder and a decoder."""
