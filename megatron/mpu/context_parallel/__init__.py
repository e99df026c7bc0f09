"""Context parallelism: the ranks of cp share the tokens of every sequence.

Hidden states are [s/cp, b, h]; ids, labels and masks stay whole, and layers take their own part.
Attention is the only layer in which tokens of different ranks meet.
"""
