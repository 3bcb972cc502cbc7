"""A learning rate found in the first steps of a run, or before it: displacement, a trial, an interval."""
