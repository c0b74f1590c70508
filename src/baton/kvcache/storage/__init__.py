"""Storage backends of the KV cache: files, Redis, Mooncake Store, and plug-ins by entry point."""
