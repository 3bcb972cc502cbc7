"""What one run holds: the schedule, fan-out, cycle statistics, parameters, snapshots, history,
faults, and the checks at its start."""
