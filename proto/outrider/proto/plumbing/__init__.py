"""Plumbing that every server needs beside the contract."""
