"""Processes: their children, signals, ends, ports, and words while one waits."""
