"""How many small faults do the tests notice? A sample of cosmic-ray's mutants of a package.

    python -m benchmarks.mutants hdet/core tests/core [--sample 55] [--seed 7]

Run it in a clone of its own, because cosmic-ray writes each fault into the sources; `pip install
cosmic-ray` first, and copy the native module. A mutant is *killed* if a test fails. Faults inside
of annotations, which are never evaluated here, are left out. Survivors are printed.
"""

from __future__ import annotations

import argparse
import random
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

CONFIG = """
[cosmic-ray]
module-path = "{package}"
timeout = 90.0
excluded-modules = []
test-command = "{python} -m pytest -q -x -p no:cacheprovider {tests}"
[cosmic-ray.distributor]
name = "local"
"""


def sample(session: Path, count: int, seed: int) -> int:
    """Leaves so many mutants in the session, and returns how many there were."""
    with sqlite3.connect(session) as database:
        rows = database.execute(
            "select job_id, operator_name from mutation_specs"
            " order by module_path, operator_name, operator_args, occurrence"
        )
        jobs = rows.fetchall()
        # mostly `float | None`
        real = [job for job, operator in jobs if "BinaryOperator_BitOr" not in operator]
        kept = set(random.Random(seed).sample(real, min(count, len(real))))
        for table in ("mutation_specs", "work_items"):
            gone = [(job,) for job, _ in jobs if job not in kept]
            database.executemany(f"delete from {table} where job_id = ?", gone)
    return len(real)


def outcomes(session: Path) -> list[tuple[str, str, int, str]]:
    """(outcome, file, row, operator) of each mutant."""
    with sqlite3.connect(session) as database:
        return database.execute(
            "select r.test_outcome, m.module_path, m.start_pos_row, m.operator_name"
            " from mutation_specs m join work_results r on r.job_id = m.job_id"
        ).fetchall()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("package", help="a folder or a file of the sources")
    parser.add_argument("tests", help="what pytest is given")
    parser.add_argument("--sample", type=int, default=55)
    parser.add_argument("--seed", type=int, default=7)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        config, session = Path(folder, "config.toml"), Path(folder, "session.sqlite")
        config.write_text(
            CONFIG.format(package=options.package, tests=options.tests, python=sys.executable)
        )
        subprocess.run(["cosmic-ray", "init", str(config), str(session)], check=True)
        total = sample(session, options.sample, options.seed)
        subprocess.run(["cosmic-ray", "exec", str(config), str(session)], check=True)
        found = outcomes(session)
    survived = [one for one in found if "SURVIVED" in one[0]]
    killed = len(found) - len(survived)
    print(f"{options.package}: {killed} of {len(found)} mutants killed, of {total} there are")
    for _, file, row, operator in survived:
        print(f"  survived: {file}:{row} {operator.removeprefix('core/')}")


if __name__ == "__main__":
    main()
