"""NAMES what crosses a boundary. Nothing here decides and nothing here acts."""
