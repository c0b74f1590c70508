"""The engine process: the instance machine, its children, its callers."""
