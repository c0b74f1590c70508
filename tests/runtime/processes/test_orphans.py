"""As process 1 of a container, or as a subreaper, we wait for orphans; and never for what somebody else waits for."""

from __future__ import annotations

import asyncio
import subprocess
import sys

from run_loop import finish

from baton.runtime.processes import orphans as module
from baton.runtime.processes.orphans import Orphans, reaps_orphans

PROGRAM = """
import asyncio, ctypes, os, subprocess, sys
from baton.runtime.processes import orphans
from baton.runtime.processes.orphans import Orphans, _zombies_of, reaps_orphans

assert not reaps_orphans()
ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
assert reaps_orphans()
orphans.LOOK_SECONDS = 0.05

CHILD = '''
import subprocess, sys
subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=0)
sys.exit(7)
'''

async def main():
    read, write = os.pipe()
    child = subprocess.Popen([sys.executable, "-c", CHILD], stdin=read)
    os.close(read)
    reaper = Orphans(lambda: [child.pid])
    while not _zombies_of(os.getpid()):
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.3)
    print("own", child.poll())
    os.close(write)  # the grandchild, which is ours now, ends
    while not reaper.reaped:
        await asyncio.sleep(0.01)
    print("reaped", reaper.reaped, "left", _zombies_of(os.getpid()))
    reaper.close()

asyncio.run(asyncio.wait_for(main(), 40))
"""


def test_a_subreaper_reaps_orphans_and_leaves_its_own_children_to_who_started_them():
    ended = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=False)
    assert ended.stdout.splitlines() == ["own 7", "reaped 1 left []"], ended.stderr


def test_a_process_that_gets_no_orphans_waits_for_none(monkeypatch):
    async def main() -> None:
        monkeypatch.setattr(module, "LOOK_SECONDS", 0.001)
        assert not reaps_orphans()
        reaper = Orphans(list)
        child = subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"])
        await asyncio.sleep(0.2)
        reaper.close()
        assert (await asyncio.to_thread(child.wait), reaper.reaped) == (3, 0)

    finish(main())
