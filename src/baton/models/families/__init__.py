"""One file per family of models: its names in files, its traits, and the places of its parameters."""
