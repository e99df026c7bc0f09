"""What noticing faults costs while there are none."""
