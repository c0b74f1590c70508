"""`python -m baton.runtime.cache`: a row of processes/process_table.py."""

from baton.runtime.cache.process import main

main()
