"""Record and show the numbers of a run, and preview it before it starts."""
