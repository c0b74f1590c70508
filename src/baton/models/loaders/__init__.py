"""Sources of weights: safetensors.py (Hugging Face folders), gguf.py, dummy.py. All implement WeightSource of weights.py."""
