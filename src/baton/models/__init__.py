"""Models: from a name to something that turns tokens into logits.

The life of a model, each stage in the file that owns it:

name         "smollm2", a folder, a .gguf, a hub id     names.py finds it, aliases.py fetches what is missing
files        a folder with config.json, or one .gguf    loaders/ opens them; nothing is ever unpickled or executed
config       the model's shape, one frozen value        config.py, made by config_from_hf.py or config_from_gguf.py
parameters   our names and the shapes they must have    parameters.py; compared with the files before a tensor is read
weights      bytes and what they mean                   loaders/weights.py gives them as they are stored (raw_tensor.py),
                                                        quantise.py makes of them what is computed on
model        forward() and logits() over a flat batch   decoder.py, one for all architectures (llama.py, qwen2.py, ...)

`open.py` walks as far as the list of weights, and nothing up to there needs torch; `load.py` goes on to a torch model. The
model knows nothing of requests, blocks or caches: attention is a socket (layers/attention.py) that the worker fills with its
paged pool, and reference.py with the plainest thing that is right.
"""
