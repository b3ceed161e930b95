"""A schedule of the user's own, tried before the run."""

from collections.abc import Callable, Sequence

from errors import UserError, as_user_error
from settings.options import BY_NAME


def scale_peak(function: Callable[[float, float], float]) -> Callable[..., float]:
    """Return the schedule of a function that returns a factor of the peak rate."""

    def rate(peak: float, epoch: float, begin: int, end: int) -> float:
        return float(peak * function(epoch - begin, end - begin))

    return rate


def check_factors(name: str, positions: Sequence[float], factor_at: Callable[[float], float]) -> None:
    """Raise UserError if a schedule fails at one of these epochs, or its factor is out of bounds or changes."""
    with as_user_error(name):
        factors = [factor_at(position) for position in positions]
        # A run is resumed by the formula alone: one that counts its calls would have another rate then.
        again = [factor_at(position) for position in positions]
    for position, factor in zip(positions, factors, strict=True):
        if not 0 <= factor <= BY_NAME["lr"].at_most:
            raise UserError(f"{name}: its factor in epoch {position:g} is {factor}; expected 0 or more")
    if factors != again:
        raise UserError(f"{name}: a second call returns different factors; give a function of its arguments alone")
