"""Figures of predictions that `scripts.evaluate` adds to the metrics."""

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


def bootstrap_interval(num_hits: int, num_images: int, num_resamples: int = 10_000) -> list[float]:
    """Return the 95% interval of the share of hits, by percentiles of a bootstrap over the images with a fixed seed.

    The number of hits in a resample has a binomial distribution, so one draw gives it.
    """
    draws = numpy.random.default_rng(0).binomial(num_images, num_hits / num_images, num_resamples)
    return (numpy.percentile(draws, [2.5, 97.5]) / num_images).tolist()
