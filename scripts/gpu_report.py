"""Moved: `python -m bench.gpu_report`."""

from scripts.tool import moved

if __name__ == "__main__":
    moved("gpu_report")
