"""What controllers learn from beside training losses."""

from .measurement import Measurement, Watched

__all__ = ["Measurement", "Watched"]
