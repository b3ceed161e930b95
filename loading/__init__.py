"""Load images: find their bytes, decode them, and do both in worker processes."""
