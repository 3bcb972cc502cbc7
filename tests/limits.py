"""How long anything may take before a test calls it a hang.

A limit is there against a hang, and a machine may be many times oversubscribed: so it is far above
what anything takes, and the same everywhere. What a test says about time (that a loss is noticed
without waiting for a collective's limit, say) it says as a part of it. pyproject.toml has pytest's
own limit, for the few such waits that one test makes.
"""

HANG_S = 600.0
