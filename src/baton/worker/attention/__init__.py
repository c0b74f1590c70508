"""Paged attention of the forward pass in torch.

`gathered` copies each sequence's blocks together and uses ordinary torch: it needs no compiler, runs in any dtype, and is the
oracle of the kernels in native/csrc.
"""
