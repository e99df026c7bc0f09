"""Networks as lists of layers: building them, running slices of them, their losses and their cost.

Shapes in comments are the local shapes of one rank, in Megatron's letters: s sequence, b batch
(samples of a microbatch), h hidden size, v padded vocabulary, a attention heads, g query groups
(key/value heads), d width of one head, f width of the MLP's middle, tp the number of
tensor-parallel ranks. Tensors inside the network are sequence-first, [s, b, h].
"""
