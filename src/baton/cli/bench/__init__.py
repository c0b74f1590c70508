"""`baton bench`: workloads in, measures out.

workload.py    the requests: random, shared prefixes, or a trace
load.py        sends them to a server over HTTP (any OpenAI-style server)
offline.py     runs them with an LLM in this process
measures.py    times to numbers: TTFT, TPOT, ITL, throughput, goodput
report.py      the numbers as a self-contained HTML page
command.py     the options
"""
