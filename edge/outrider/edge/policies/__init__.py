"""Rules of the edge that have weights, papers and alternatives; none can change a token.

length     how far ahead to draft
selection  which of several drafters drafts
"""
