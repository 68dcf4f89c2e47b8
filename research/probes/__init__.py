"""Texts of a stock vLLM server over emulated links: its own stream beside drafts that are verified by probes."""
