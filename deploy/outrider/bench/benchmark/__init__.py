"""`outrider bench`: what is measured, how it is kept, and how it is shown.

record   the measured figures, and their JSON
table    the same as tables
plots    the same as pictures
report   tables and pictures on one HTML page
library  the baselines that transformers itself gives
"""
