"""`python -m baton.sim FIRST:END [--cluster]`: seeds of the simulator where the packages of the command line are not installed.

`baton simulate` is the same with a report, traces and mutants. Exit code 1: a seed has violated an invariant.
"""

from __future__ import annotations

import sys

from baton.sim.campaign import run_campaign


def main(arguments: list[str]) -> int:
    first, end = map(int, arguments[0].split(":"))
    campaign = run_campaign(range(first, end), cluster="--cluster" in arguments)
    for violation in campaign.violations:
        print(f"seed {violation.seed}: {violation.invariant}: {violation.message}", file=sys.stderr)
    return 1 if campaign.violations else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
