"""A learning rate found in the first steps of a run: displacement, a trial, an interval."""
