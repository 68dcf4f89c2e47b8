"""`traces`: drafters' hits recorded on one's own prompts, and every policy replayed on every link."""
