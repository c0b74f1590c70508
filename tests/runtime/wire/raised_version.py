"""Runs the tests of a file as a build would that speaks one version of the wire protocol more.

python raised_version.py TEST_FILE
"""

from __future__ import annotations

import sys

import pytest

from baton.protocol import versions

sys.modules["raised_version"] = sys.modules["__main__"]
assert "baton.protocol.codec" not in sys.modules, "it would have the old versions already"
versions.VERSIONS = versions.Versions(versions.VERSIONS.oldest, versions.VERSIONS.newest + 1)
print(f"speaks {versions.VERSIONS}", flush=True)
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "-p", "no:xdist", sys.argv[1]]))
