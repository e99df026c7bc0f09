"""Which dataset the flags of a run ask for, and how it is built."""
