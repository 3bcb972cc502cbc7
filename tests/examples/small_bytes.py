"""``python -m tests.examples.small_bytes``: examples.bytes with a model that takes no time."""

from __future__ import annotations

from functools import partial

from examples.bytes import training
from examples.bytes.__main__ import main
from examples.bytes.model import GPTConfig

SIZES = {
    "GPTConfig": partial(GPTConfig, context=16, width=16, layers=1, heads=2),
    "VALIDATION_WINDOWS": 2, "VALIDATION_BATCHES": 3, "SHORT_VALIDATION": 2, "LOG_EVERY": 3,
}  # fmt: skip

if __name__ == "__main__":
    for name, value in SIZES.items():
        setattr(training, name, value)
    main()
