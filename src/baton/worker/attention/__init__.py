"""Paged attention: base.py says what it is asked, native.py is the C kernel, gathered.py the plain torch one.

`gathered` copies each sequence's blocks together and uses ordinary torch: it needs no compiler, runs in any dtype, and is
what the tests measure `native` against.
"""
