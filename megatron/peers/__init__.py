"""What the ranks of a job know of each other beside collectives, by way of the rendezvous store."""
