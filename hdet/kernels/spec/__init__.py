"""What the operations are, whatever computes them: their arguments, their settings, and how they
round."""
