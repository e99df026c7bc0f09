"""Keeps all that is imported so far out of garbage collection; a server that forks imports it last.

A collection writes into every object that it looks at, so that each forked process would copy the
memory of all modules; DeepSpeed collects often.
"""

import gc

gc.collect()
gc.freeze()
