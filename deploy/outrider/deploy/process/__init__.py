"""Processes: their children, signals, ends, and words while one waits."""
