"""`outrider submit`: a command of the command line as a job on a Ray cluster, over its job server alone.

The wheel and the named inputs go up as packages of the job's runtime environment; `entry` runs the command in a
folder of the job's own and packs what it was told to fetch beside the job's log; what is packed comes back through
the log files that the job server hands out. No shared file system, no open port but that of the job server.
"""
