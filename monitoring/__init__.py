"""Record and show the numbers of a run, and estimate its needs before it starts."""
