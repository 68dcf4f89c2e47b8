"""`outrider submit`: a command of the command line as a job on a Ray cluster.

The wheel and the inputs go up with the job's runtime environment. What the command writes goes to an output place that
the nodes can write to: a shared folder, or a URL of fsspec such as `s3://bucket/run`.
"""
