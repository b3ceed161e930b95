"""How a run survives: what a checkpoint holds and may be believed, the folder it lies in, signals and locks."""
