"""The forward pass and the choice of tokens on an NVIDIA GPU: pure functions on torch tensors, which know nothing of plans.

kernels/          one Triton kernel a file, with the function that launches it
plain.py          the same functions in plain torch, on any device and in any data type: the oracle of the kernels
weights.py        a model's matrices as one step wants them
decoder_step.py   one forward pass over a flat batch, then a token for every sequence that is due
graphs.py         the same for decode steps, recorded once per padded batch size and replayed as one CUDA graph
"""
