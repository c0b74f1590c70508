"""The cache service: copies KV between pool, host memory, storage and other instances."""
