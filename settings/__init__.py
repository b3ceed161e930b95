"""Options, recipes and the checks of both, the names to choose from, and the user's own code."""

__version__ = "1.1.0.dev0"  # as in pyproject.toml
