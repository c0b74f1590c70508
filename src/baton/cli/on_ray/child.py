"""The first process of a keeper's tree: `python -m baton.cli.on_ray.child KEEPER_PID COMMAND ...` is `baton COMMAND ...`. The
kernel kills it when the keeper dies; Ray leaves processes that its actors have started alive."""

from __future__ import annotations

import sys


def main() -> None:
    from baton.runtime.processes.children import die_with_parent

    die_with_parent(int(sys.argv.pop(1)))
    from baton.cli.main import app

    app()


if __name__ == "__main__":
    main()
