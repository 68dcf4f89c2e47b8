"""Servers started here: a local Ray cluster, its processes, and an edge that learns for itself."""
