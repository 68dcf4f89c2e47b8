"""Thousands of live edges against real coordinator processes: `python -m research crowd`."""
