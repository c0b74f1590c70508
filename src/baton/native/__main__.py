"""`python -m baton.native`: finds or compiles the kernels for this machine, and prints which.

With --all: the kernels of every variant that this machine can run, which the tests compare.
"""

from __future__ import annotations

import sys

from baton.native.build import NoCompiler
from baton.native.library import Library, load_best, load_variant
from baton.native.variants import supported_variants


def main(arguments: list[str]) -> int:
    try:
        loaded: list[Library] = (
            [load_variant(variant) for variant in supported_variants()] if "--all" in arguments else [load_best()]
        )
    except NoCompiler as error:
        print(f"no kernels in C: {error}", file=sys.stderr)
        return 1
    for library in loaded:
        print(f"kernels: {library.variant.name} ({library.variant.description})")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
