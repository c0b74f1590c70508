"""Models: from a name to something that turns tokens into logits.

The life of a model, each stage in the file that owns it:

name         "smollm2", a folder, a .gguf, a hub id     names.py resolves it, aliases.py fetches missing files
files        a folder with config.json, or one .gguf    loaders/ opens them; nothing is ever unpickled or executed
config       the model's shape, one frozen value        config.py, built by config_from_hf.py or config_from_gguf.py
parameters   our names and the shapes they must have    parameters.py; compared with the files before a tensor is read
weights      bytes and their type                       loaders/weights.py returns them as stored (raw_tensor.py), quantise.py
             converts them to the compute format
model        forward() and logits() over a flat batch   decoder.py, one for all architectures (llama.py, qwen2.py, ...)

`open.py` runs the stages up to the list of weights, without torch; `load.py` continues to a torch model. The model is
independent of requests, blocks and caches: attention is an interface (layers/attention.py) that the worker implements with its
paged pool.
"""
