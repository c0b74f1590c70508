"""`python -m baton.runtime.engine`: a row of processes/process_table.py."""

from baton.runtime.engine.process import main

main()
