"""Where the numbers of a run go, and what a command would do before it is run."""
