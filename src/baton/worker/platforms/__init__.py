"""Hardware: everything that differs between devices is a method of a Platform (base.py)."""
