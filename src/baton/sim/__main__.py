"""`python -m baton.sim FIRST:END [--cluster | --front]`: seeds without the packages of the command line.

`baton simulate` is the same with a report, traces and mutants. Exit code 1: a seed has violated an invariant.
"""

from __future__ import annotations

import sys

from baton.sim.campaign import run_campaign
from baton.sim.run import Kind


def main(arguments: list[str]) -> int:
    first, end = map(int, arguments[0].split(":"))
    kind: Kind = "cluster" if "--cluster" in arguments else "front" if "--front" in arguments else "instance"
    campaign = run_campaign(range(first, end), kind=kind)
    for violation in campaign.violations:
        print(f"seed {violation.seed}: {violation.invariant}: {violation.message}", file=sys.stderr)
    return 1 if campaign.violations else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
