"""`outrider train policy`: the networks of the trained length rules, from recorded hit traces."""
