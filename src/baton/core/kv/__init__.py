"""Blocks of the KV cache: holders, contents, eviction, and moves between tiers."""
