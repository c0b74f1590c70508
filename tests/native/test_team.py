"""Threads of the library: any number of them agree and finish, and none is left; buffers grow with the steps."""

from __future__ import annotations

import os
import platform
import random
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from decoder_cases import QUANTISED_CASES, Conversation, load, same_bits
from steps import random_steps

from baton.errors import EngineError
from baton.native.build import SOURCES, NoCompiler, find_compiler
from baton.native.library import NativeStep, load_best
from baton.worker.forward.native_forward import NativeForward

CONFIG = QUANTISED_CASES["everything"]
LENGTHS = [50, 9, 3]


def tasks() -> int:
    return len(os.listdir("/proc/self/task"))


def forward_of(talk: Conversation, threads: int = 1, quantization: str = "int8") -> NativeForward:
    return talk.forward(load(load_best(), talk.config, quantization=quantization, threads=threads))


def test_any_number_of_threads_agrees_and_ends():
    """More of them than there are cores, in steps that are too small to give all of them something to do."""
    results = []
    for threads in range(1, 9):
        talk = Conversation(CONFIG, LENGTHS)
        before = tasks()
        forward = forward_of(talk, threads)
        assert tasks() == before + threads - 1
        assert forward._decoder.threads == threads
        results.append(talk.run(forward, random_steps(random.Random(threads), LENGTHS)))
        forward.close()
        assert tasks() == before
    assert all(same_bits(results[0], other) for other in results[1:])


def test_many_short_lives_leave_nothing_behind():
    talk, before = Conversation(CONFIG, [1]), tasks()
    for threads in (2, 5, 1, 8) * 5:
        forward = forward_of(talk, threads)
        talk.run(forward, [[(0, 0, 1)]])
        forward.close()
        forward.close()  # harmless
    assert tasks() == before


def test_a_small_step_after_a_large_one_and_the_other_way_round():
    talk = Conversation(CONFIG, [1, 300, 1, 1, 2, 1, 1])
    expected = talk.run(forward_of(talk), [[part] for part in talk.all_at_once()])
    whole = talk.all_at_once()
    small_first, large_first = [whole[:1], whole[1:2], whole[2:]], [whole[1:2], whole[:1], whole[2:]]
    for steps in (small_first, large_first, [whole]):
        forward = forward_of(talk, 2)
        assert same_bits(talk.run(forward, steps), expected)
        forward.close()


@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_logits_of_any_number_of_rows(quantization):
    """Of more rows than any step had, of one, and before there was any step."""
    talk = Conversation(CONFIG, [40])
    forward = forward_of(talk, 2, quantization)
    (result,) = talk.run(forward, [talk.all_at_once()])
    forward.close()
    rows = np.concatenate([result.hidden] * 5)
    for counts in ((1, 200, 2), (3, 17, 1), (200, 1)):
        fresh = forward_of(talk, 2, quantization)
        for count in counts:
            assert np.array_equal(fresh.logits(rows[:count]), np.concatenate([result.logits] * 5)[:count])
        assert np.array_equal(fresh.logits(rows[3:9][::2]), result.logits[3:9:2])  # rows that do not lie together
        fresh.close()


def test_logits_may_be_written_to_and_hidden_rows_are_lent():
    talk = Conversation(CONFIG, [12])
    forward = forward_of(talk)
    hidden = forward.hidden(talk.flat(talk.all_at_once()))
    kept, logits = hidden.copy(), forward.logits(hidden)
    expected = logits.copy()
    logits[:] = np.nan
    assert np.array_equal(forward.logits(kept), expected)
    assert np.array_equal(hidden, kept)  # asking for logits left them alone
    forward.close()


def test_a_step_that_does_not_fit_into_memory_is_refused_and_the_next_one_runs():
    talk = Conversation(CONFIG, LENGTHS)
    forward = forward_of(talk)
    expected = talk.run(forward, [talk.all_at_once()])
    with pytest.raises(EngineError, match="not enough memory"):
        forward._decoder.hidden(NativeStep(1, 2**44))
    assert same_bits(talk.run(forward, [talk.all_at_once()]), expected)
    forward.close()


def run_program(folder: Path, name: str, *flags: str) -> str:
    """What a C program beside this file says."""
    try:
        compiler = find_compiler()
    except NoCompiler as error:
        pytest.skip(str(error))
    program, source = folder / name, Path(__file__).parent / f"{name}.c"
    command = [*compiler, "-std=gnu11", "-O2", *flags, f"-I{SOURCES}", str(source), "-o", str(program), "-lm", "-lpthread"]
    subprocess.run(command, check=True)
    return subprocess.run([program], capture_output=True, text=True, timeout=120, check=True).stdout


@pytest.mark.parametrize("system", ["this one", "without futexes"])
def test_a_member_that_is_woken_at_the_worst_moment_is_not_lost(tmp_path, system):
    flags = ["-U__linux__"] if system == "without futexes" else []
    assert run_program(tmp_path, "late_member", *flags) == "ended\n"


@pytest.mark.skipif(sys.platform != "linux", reason="the delay is put before a futex")
def test_a_member_that_falls_asleep_late_does_not_sleep_for_ever(tmp_path):
    assert run_program(tmp_path, "sleeping_member") == "ended\n"


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only there can the size of stacks be set from outside")
def test_small_stacks_are_enough(tmp_path):
    assert run_program(tmp_path, "small_stacks") == "ended\n"


def test_two_models_at_once():
    """Each with threads of its own, called from two threads of Python: nothing in the library is shared."""
    talks = [Conversation(CONFIG, LENGTHS, seed) for seed in (1, 2)]
    steps = random_steps(random.Random(3), LENGTHS)
    forwards = [forward_of(talk, 2) for talk in talks]
    expected = [talk.run(forward, steps) for talk, forward in zip(talks, forwards, strict=True)]
    same = [True, True]

    def again(which: int) -> None:
        for _ in range(5):
            same[which] &= same_bits(talks[which].run(forwards[which], steps), expected[which])

    workers = [threading.Thread(target=again, args=(which,)) for which in (0, 1)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert same == [True, True]
    for forward in forwards:
        forward.close()
