"""The program that times kernels still compiles, runs, and says what it should."""

from argparse import Namespace
from collections import defaultdict

import pytest

from baton.native.build import NoCompiler, find_compiler
from kernel_times import HERE, build, run


@pytest.mark.slow
def test_a_step_is_timed_phase_by_phase(tmp_path):
    try:
        find_compiler()
    except NoCompiler as error:
        pytest.skip(str(error))
    program = build(HERE.parent, "plain", tmp_path, [])
    found = defaultdict(lambda: defaultdict(lambda: ([], [])))
    run(program, "4", Namespace(threads=2, kv="bytes", repeats=2, steps="1x1@5,2x3@20"), found, "here")
    assert list(found) == [("1x1@5, 4 bits", "here"), ("2x3@20, 4 bits", "here")]
    for times in found.values():
        least, middle = (times["all"][i][0] for i in (0, 1))
        assert 0 < least <= middle
        assert sum(times[phase][0][0] for phase in times if phase != "all") <= middle + 0.01  # printed with four digits
