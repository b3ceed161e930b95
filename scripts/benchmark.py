"""Moved: `python -m bench.benchmark`."""

from scripts.tool import moved

if __name__ == "__main__":
    moved("benchmark")
