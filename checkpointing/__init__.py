"""How a run survives: the content of a checkpoint and its checks, the folder of checkpoints, signals and locks."""
