"""Steps on an NVIDIA GPU."""
