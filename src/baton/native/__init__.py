"""The decoder in C, for CPUs: csrc/ is the library, the rest builds it, loads it and gives it a model.

variants   which instructions this processor has
prebuilt   finds the libraries that a wheel carries
build      compiles csrc/ for one of them, once a machine, where no prebuilt library fits
library    the C functions and structures
plan       which matrices a model's weights become, and their bytes
packing    a model's weights in the order in which the products read them
decoder    a packed model on a KV pool: steps in, hidden rows and logits out

No torch in here: a worker that computes natively never loads it.
"""
