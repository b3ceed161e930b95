"""Code of the user's own, which the command line names."""
