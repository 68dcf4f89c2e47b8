"""`outrider engine-bench`: time of a target's steps on a CPU, by part."""
