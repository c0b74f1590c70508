"""The forward pass: base.py says what it is asked, each other file is a way to do it."""
