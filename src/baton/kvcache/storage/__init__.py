"""Storage backends of the KV cache: files, Redis, Mooncake Store, and what an entry point brings."""
