"""`python -m baton.native`: compile the kernels for this machine now, and say which they are."""

from __future__ import annotations

import sys

from baton.native.build import NoCompiler
from baton.native.library import load_best


def main() -> int:
    try:
        variant = load_best().variant
    except NoCompiler as error:
        print(f"no kernels in C: {error}", file=sys.stderr)
        return 1
    print(f"kernels: {variant.name} ({variant.what})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
