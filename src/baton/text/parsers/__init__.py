"""From the text of an answer to its typed parts: content, reasoning, tool calls. base.py is the socket, the others fill it."""
