"""A verifier that computes nothing: a stock server scores tokens over its own HTTP; rule and noise are ours."""
