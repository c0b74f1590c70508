"""`baton bench`: workloads in, measures out.

workload.py    what is asked: random, shared prefixes, or a trace
load.py        asks a server for it over HTTP (any OpenAI-style server)
offline.py     asks an LLM in this process for it
measures.py    times to numbers: TTFT, TPOT, ITL, throughput, goodput
report.py      the numbers as a self-contained HTML page
command.py     the options
"""
