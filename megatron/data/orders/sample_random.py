"""Random numbers that belong to one sample: equal in any worker, at any time, at any layout.

What a reader would get wrong: a generator that lives as long as its dataset gives other numbers
after a resume and in every worker. So each sample has a generator of its own, made when it is read.
"""

import numpy as np
import xxhash


def random_of_sample(seed: int, index: int, *, use: str) -> np.random.RandomState:
    """Return the random generator of sample `index`, different for each `use`.

    A RandomState, whose stream NumPy has promised to keep. `seed` and `index` are 0 or more, the
    seed below 2**32 and the index below 2**64.
    """
    words = [seed, index & 0xFFFFFFFF, index >> 32, xxhash.xxh32_intdigest(use.encode())]
    return np.random.RandomState(words)
