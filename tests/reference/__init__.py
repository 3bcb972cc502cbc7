"""A second derivation of the method, in plain Python floats (float64), from the equations alone.

It shares no code with hdet.
"""
