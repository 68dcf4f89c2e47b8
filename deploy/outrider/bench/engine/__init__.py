"""`outrider engine-bench`: time of a target's steps on a CPU by part, in turn with those of other engines."""
