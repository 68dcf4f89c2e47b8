"""`outrider train policy`: the networks of the trained length rules, from recorded hit traces.

command  reads traces, trains both networks, evaluates them, writes the file
rows     what is learnt: inputs and outcomes, row by row
fit      a network to rows
evaluation  how well a network's chances hold on texts that it has not seen
"""
