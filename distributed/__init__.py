"""The processes of a run: launchers, signals, collectives, the decision of each step, watchdogs, and ends."""
