"""Figures of predictions that tools add to the metrics."""

import math

import numpy


def calibration_error(confidence: numpy.ndarray, is_hit: numpy.ndarray, num_bins: int = 15) -> float:
    """Return the expected calibration error (Guo et al., arXiv 1706.04599), with bins of equal width.

    Args:
        confidence: (N,) the highest probability of each image.
        is_hit: (N,) whether the class of that probability is the image's.
        num_bins: number of bins; a bin holds its upper edge, but not its lower one.
    """
    edges = numpy.linspace(0, 1, num_bins + 1)[1:-1]
    gaps = numpy.bincount(numpy.searchsorted(edges, confidence), weights=is_hit - confidence)
    return float(numpy.abs(gaps).sum() / len(confidence))


def wilson_interval(num_hits: int, num_images: int) -> tuple[float, float]:
    """Return the 95 % interval of a share of hits, both ends in percent.

    Wilson, Probable inference, the law of succession, and statistical inference, Journal of the American Statistical
    Association 22 (1927), 209-212. It is not empty where all images are hits, as a bootstrap's is: of 42 from 91.6.
    """
    z = 1.959964  # the quantile of the normal distribution at 0.975
    share, shrink = num_hits / num_images, z * z / num_images
    middle = (share + shrink / 2) / (1 + shrink)
    margin = math.sqrt(shrink * (share * (1 - share) + shrink / 4)) / (1 + shrink)
    return max(100 * (middle - margin), 0.0), min(100 * (middle + margin), 100.0)


def share_text(num_hits: int, num_images: int) -> str:
    """Return a share with its numbers and the digits that its interval leaves: `88.1 % (37 of 42; 95 %: 75 to 95)`."""
    low, high = wilson_interval(num_hits, num_images)
    digits = (high - low < 10) + (high - low < 1)
    ends = f"{low:.{digits}f} to {high:.{digits}f}"
    return f"{100 * num_hits / num_images:.{digits + 1}f} % ({num_hits:,} of {num_images:,}; 95 %: {ends})"
