"""Blocks of the KV cache: who holds them, what is in them, which go first."""
