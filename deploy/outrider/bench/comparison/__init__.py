"""Drafters side by side: block efficiency, as SD² measures it (arXiv 2511.09844), exactly and without a network."""
