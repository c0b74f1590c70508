"""One process advances the word, another sees it."""

import ctypes
import os

from baton.protocol.progress import ProgressWord


def test_both_see_the_same_word():
    ours = ProgressWord.create()
    theirs = ProgressWord(os.dup(ours.fd))
    assert (ours.value, theirs.value) == (0, 0)
    ours.advance()
    ours.advance()
    assert theirs.value == 2
    ctypes.c_uint64.from_address(ours.address).value = 2**64 - 1
    assert theirs.value == 2**64 - 1
    ours.advance()
    assert theirs.value == 0, "it wraps around: only a change is looked for"
    theirs.close()
    ours.advance()
    ours.close()


def test_its_descriptor_is_not_inherited_by_accident():
    word = ProgressWord.create()
    assert not os.get_inheritable(word.fd)
    word.close()
