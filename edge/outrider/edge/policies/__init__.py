"""Rules of the edge that have papers and alternatives: which of several drafters drafts. None can change a token."""
