"""All tables of docs/evidence/replicas.md that are made of lines in the repository.

python -m benchmarks.evidence.report
"""

from __future__ import annotations

from . import hero, horizon, outer, paper, several


def report() -> str:
    experiments = (one.EXPERIMENT for one in (hero, paper, horizon, outer, several))
    return "\n".join(one.table(one.read()) for one in experiments)


if __name__ == "__main__":
    print(report(), end="")
