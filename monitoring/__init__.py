"""Where the numbers of a run go, and estimates before it starts."""
