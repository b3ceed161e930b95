"""Let work beside the training, such as records and pictures, fail without ending the run."""

from collections.abc import Callable
from typing import Any


class Attempts:
    """Tries work whose failure must not end a run, and prints one warning for each trouble."""

    def __init__(self) -> None:
        self._warned = set()

    def __call__(self, trouble: str, work: Callable[..., Any], *args: Any) -> bool:
        """Return whether the work succeeds; at its first failure print the trouble that follows, and the reason."""
        try:
            work(*args)
        except Exception as error:  # of any library
            if trouble not in self._warned:
                self._warned.add(trouble)
                reason = (str(getattr(error, "strerror", None) or error).splitlines() or [""])[0]
                kind = "" if reason and isinstance(error, OSError) else f"{type(error).__name__}: "
                print(f"warning: {trouble}: {kind}{reason}; training continues")
            return False
        return True
