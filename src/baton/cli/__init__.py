"""TALKS to people: the command line. Every command loads what it needs when it is called, so that `--help` is at once there."""
