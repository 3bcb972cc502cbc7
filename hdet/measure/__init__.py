"""What controllers learn from: losses, probes, weight lines, cosines."""

from .measurement import Measurement, Watched

__all__ = ["Measurement", "Watched"]
