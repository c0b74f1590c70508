"""Hardware. Everything that differs between devices is a method of a Platform (base.py); cpu.py is the first."""
