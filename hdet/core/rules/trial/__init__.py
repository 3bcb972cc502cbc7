"""The rule inside `hdet.AutoLR`, in pieces: `rule` has what the others do for it, from the top to the ground."""

from .rule import TrialRule

__all__ = ["TrialRule"]
