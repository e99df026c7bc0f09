"""The ranks of one engine behind the server: what they execute alike, and who leads them."""
