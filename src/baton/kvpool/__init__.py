"""The KV pool: layout of a block, shared memory that holds blocks, free memory. A leaf: worker and cache service import it, it
imports neither."""
