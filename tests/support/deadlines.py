"""How long a test waits for what has to happen at all."""

# Only a hang takes longer. A start of a program takes 3 s on a free core, an answer of a server far
# less; beside the other tests of a loaded machine each may take many times that.
HANG_S = 90.0
