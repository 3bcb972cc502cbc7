"""The problems that everything is measured on: a small transformer, a classifier, a recommender.

A problem fixes model, data, batch and length of the run. What trains it, and with which rate, is
the method's business.
"""

from __future__ import annotations

from .digits import DIGITS
from .problem import Batch, Problem
from .recsys import RECSYS
from .transformer import TRANSFORMER

__all__ = ["PROBLEMS", "Batch", "Problem"]

PROBLEMS: dict[str, Problem] = {problem.name: problem for problem in (TRANSFORMER, DIGITS, RECSYS)}
