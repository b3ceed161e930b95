"""Moved: `python -m bench.ledger`."""

from scripts.tool import moved

if __name__ == "__main__":
    moved("ledger")
