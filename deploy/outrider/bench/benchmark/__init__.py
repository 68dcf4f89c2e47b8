"""`outrider bench`: ways of decoding the same prompts, measured side by side.

bench_command   from options to record and report
bench_verifier  the verifier in a process of its own
measure         decode a prompt, and observe its session
runs            from observations to runs
bench_record    runs as JSON
bench_table     runs as tables
plots           runs as pictures
html_report     tables and pictures on one HTML page
"""
