"""What each family of models is: its names in files, its traits, and where its parameters are. One file a family."""
