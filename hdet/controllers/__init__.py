"""Controllers that users construct, and what they measure."""

from .measurement import Measurement, Watched

__all__ = ["Measurement", "Watched"]
