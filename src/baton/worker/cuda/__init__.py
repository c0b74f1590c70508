"""Steps on an NVIDIA GPU. executor.py is the interface to the model runner. Below it are pure functions on torch tensors,
independent of plans.

executor.py       launches steps before the previous tokens reach the host, and collects their tokens
columns.py        settings by slot, host to device
pooled.py         embeddings: which rows are summed on the device, and vectors of the sums
loader.py         weights from files to the device, file_bytes.py: reading of files
adjustments.py    penalties, bias, excluded tokens and log-probabilities; read_logprobs.py: how the host reads those
experts.py        a mixture of experts in place of an MLP
plain_executor.py the same steps in plain torch (--compute torch): slow, and the oracle
kernels/          one Triton kernel per file, with the function that launches it
weights.py        a model's matrices in the layout of a step
layer_steps.py    decoder layers: one body, whose products depend on the number of rows
decoder_step.py   one forward pass over a flat batch, then a token per due sequence
graphs.py         the same for decode steps, recorded once per padded batch size and replayed as one CUDA graph
"""
