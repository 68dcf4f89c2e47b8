"""`python -m research engine`: time of a target's steps on a CPU by part, in turn with transformers."""
