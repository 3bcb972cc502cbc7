"""What the lines of the evidence say, as tables and figures: ``python -m
benchmarks.evidence.report FILE ... [--out FOLDER]``."""
