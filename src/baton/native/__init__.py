"""The decoder in C, for CPUs: csrc/ is the library, the rest builds it, loads it and passes it a model.

variants   instruction sets, and which of them this CPU has
prebuilt   finds the libraries that a wheel carries
build      compiles csrc/ for one of them, once per machine, if no prebuilt library fits
library    the C functions and structures
plan       the matrices that a model's weights become, and their sizes
packing    a model's weights in the order in which the products read them
decoder    a packed model on a KV pool: steps in, hidden rows and logits out

Nothing here imports torch: a native worker never loads it.
"""
