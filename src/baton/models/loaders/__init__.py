"""Where weights come from: safetensors.py (Hugging Face folders), gguf.py, dummy.py. All of them fill weights.py."""
