"""`python -m baton.runtime.router`: a row of processes/process_table.py."""

from baton.runtime.router.process import main

main()
