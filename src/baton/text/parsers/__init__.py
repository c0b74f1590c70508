"""Parsers of an answer's text to typed parts: content, reasoning, tool calls. base.py has the interface."""
