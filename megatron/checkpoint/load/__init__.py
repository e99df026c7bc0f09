"""Loading a checkpoint of any format by all ranks of a job."""
