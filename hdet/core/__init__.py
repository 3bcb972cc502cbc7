"""The method without tensors or processes: multipliers, clock, controllers, engine. Imports nothing
but the standard library."""
