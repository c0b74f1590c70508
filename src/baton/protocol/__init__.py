"""NAMES everything that crosses a process boundary. Nothing here decides or acts."""
