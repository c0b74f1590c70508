"""`python -m baton.runtime.front`: a row of processes/process_table.py."""

from baton.runtime.front.process import main

main()
