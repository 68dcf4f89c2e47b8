"""Lessons from verification: what a verifier keeps, and how drafters learn from it."""
