"""The parts of an Ensemble: cycles, fan-out, statistics, parameters, measurements, records, faults,
and the checks at a run's start."""
