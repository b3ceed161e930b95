"""How images get in: where their bytes lie, how they are decoded, and the processes that do it."""
