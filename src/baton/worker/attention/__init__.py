"""Paged attention of the forward pass in torch: base.py says what it is asked, gathered.py does it in plain torch.

`gathered` copies each sequence's blocks together and uses ordinary torch: it needs no compiler, runs in any dtype, and is
what the tests measure the kernels in native/csrc against.
"""
