"""Putting the parts together: command line, local cluster, demo."""
