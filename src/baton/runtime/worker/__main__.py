"""`python -m baton.runtime.worker`: a row of processes/process_table.py."""

from baton.runtime.worker.process import main

main()
