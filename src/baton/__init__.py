"""Baton: an LLM serving engine. See docs/internals/architecture.md for the map."""

__version__ = "0.1.0"
DISTRIBUTION = "baton-serve"
"""Name on PyPI, where another project is called baton."""
