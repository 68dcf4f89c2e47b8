"""Measure the system: benchmark, comparison of drafters, traces and their replay, training of length rules."""
