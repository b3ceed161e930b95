"""Tools, run as `python -m scripts.NAME`."""
