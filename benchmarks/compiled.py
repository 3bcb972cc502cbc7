"""What nvcc has made of the step kernels of one replica, and what that predicts for an H200.

Needs hdet with its CUDA kernels, and no GPU.

    python -m benchmarks.compiled [--arch 90] [--json FILE]

Of each kernel: registers of a thread; blocks that fit on a multiprocessor; instructions of the main
loop, in which a thread has eight elements; and bytes that a parameter moves. The prediction is the
larger of two times: of the bytes at the bandwidth that a copy reaches, and of the instructions at
one a cycle for each of the four schedulers. Instructions of branches that are not taken are counted
as well, so theirs is an upper bound. `make gpu` measures the same operations
(benchmarks/kernels.py).
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hdet import _C
from hdet.rules import RULES

from .harness import emit, parser_of
from .tables import table

BANDWIDTH = 4.3e12
"""bytes a second: what copies reach of an H200's 4.8e12"""
ISSUED = 132 * 4 * 32 * 1.755e9
"""instructions a second: multiprocessors, schedulers, lanes, clock"""
REGISTERS, THREADS = 65536, 128
"""of a multiprocessor; of a block"""
GPT2 = 124_439_808
ELEMENTS = 8
"""of a thread's turn"""
KNOWN = ("any", "float32", "bf16 with float32 masters", "bf16, split", "bf16 throughout")
"""csrc/core/numbers.h: Known"""


def _bytes(moments: int, low: int) -> tuple[int, ...]:
    """By `KNOWN`; ``low``: of moments in bf16, which any formats have."""
    return 12 + low, 12 + 8 * moments, 12 + 8 * moments, 10 + 8 * moments, 6 + low


BYTES = {
    name: _bytes(len(rule.moments), 4 * len(rule.moments + rule.exact))
    for name, rule in RULES.items()
}
"""that a step moves for a parameter, by rule"""


def tool(name: str) -> str | None:
    """CUDA's, or the one that comes with Triton."""
    spec = importlib.util.find_spec("triton")
    own = Path((spec and spec.origin) or "nowhere/").parent / "backends" / "nvidia" / "bin" / name
    return shutil.which(name) or (str(own) if own.exists() else None)


def missing() -> str:
    """Why compiled kernels cannot be looked at; empty if they can."""
    for name in ("cuobjdump", "nvdisasm", "ptxas"):
        if tool(name) is None:
            return f"there is no {name}, neither CUDA's nor Triton's"
    return "" if _C.cuda else f"hdet has no CUDA kernels: {_C.cuda_note}"


@dataclass(frozen=True)
class Used:
    """By a kernel."""

    registers: int
    """Of a thread."""
    stack: int
    local: int
    """Bytes of a thread, which spilled registers would take."""


def resources(arch: str) -> dict[str, Used]:
    """By the names of all kernels that hdet has been built with for this compute capability."""
    told = _run("cuobjdump", "-res-usage", "-arch", f"sm_{arch.split('-')[0]}", _C.__file__)
    found = re.findall(r"Function (\S+):\s+REG:(\d+) STACK:(\d+) \S+ LOCAL:(\d+)", told)
    return {name: Used(*map(int, numbers)) for name, *numbers in found}


def instructions(arch: str, kernel: str) -> str:
    """Of the files that have kernels of this name."""
    with _extracted("elf", arch) as files:
        having = [str(path) for path in files if kernel.encode() in path.read_bytes()]
        return "".join(_run("nvdisasm", "-c", path) for path in having)


def ptx(arch: str) -> dict[str, str]:
    """By kernel."""
    with _extracted("ptx", arch) as files:
        texts = [re.split(r"(?:\.visible )?\.entry ", path.read_text("utf-8")) for path in files]
    return {part.split("(", 1)[0]: part for _, *parts in texts for part in parts}


@contextmanager
def _extracted(kind: str, arch: str) -> Iterator[list[Path]]:
    """The module's files for this compute capability."""
    with tempfile.TemporaryDirectory() as folder:
        _run("cuobjdump", f"-x{kind}", f"sm_{arch}", str(_C.__file__), cwd=folder)
        yield sorted(Path(folder).iterdir())


def _run(name: str, *arguments: str, cwd: str | None = None) -> str:
    command = [str(tool(name)), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd=cwd).stdout


def loop_length(code: Sequence[str]) -> int:
    """Instructions of the loop that loads the most, from its label to its branch."""
    is_label = lambda line: line.startswith(".L") and line.endswith(":")
    labels = {line[:-1].strip(): place for place, line in enumerate(code) if is_label(line)}
    best: tuple[int, int] = (0, 0)
    for place, line in enumerate(code):
        target = re.search(r"BRA\S*.*`\((\.L\S+)\)", line)
        if target is None or labels.get(target[1], place) >= place:
            continue
        inside = code[labels[target[1]] : place + 1]
        body = [one for one in inside if ";" in one and "NOP" not in one]
        best = max(best, (sum("LDG" in one for one in body), -len(body)))
    return -best[1]


def lines(arch: str) -> Iterator[dict[str, Any]]:
    used_by, code = resources(arch), instructions(arch, "step_kernel")
    for part in re.split(r"\n\s*\.section\s+\.text\.", code)[1:]:
        name = part.split(",", 1)[0].strip()
        found = re.search(r"\d([A-Z]\w+)RuleELb0ELNS_\d+KnownE(?=0ELb1|[1-9]ELb0)(\d)E", name)
        if found is None:
            continue
        kernel, known = found[1].lower(), int(found[2])
        used, length = used_by[name].registers, loop_length(part.splitlines())
        # AnyRule stands for all that have no kernel of mixtures
        for rule in [kernel] if kernel in RULES else RULES.keys() - {"adamw"}:
            by_memory = BYTES[rule][known] * GPT2 / BANDWIDTH
            by_issue = length / ELEMENTS * GPT2 / ISSUED
            yield {
                "rule": rule,
                "formats": KNOWN[known],
                "registers": used,
                "blocks": min(16, REGISTERS // (THREADS * (used + 7 & ~7))),
                "instructions": round(length / ELEMENTS, 1),
                "bytes": BYTES[rule][known],
                "gpt2_us": round(1e6 * max(by_memory, by_issue), 1),
                "bound": "memory" if by_memory > by_issue else "instructions",
            }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--arch", default="90", help="compute capability without its dot")
    options = parser.parse_args(arguments)
    if why := missing():
        parser.error(why)
    if options.arch not in _C.cuda_archs.split():
        here = f"hdet has been built for {_C.cuda_archs}"
        parser.error(f"{here}; HDET_CUDA_ARCHS={options.arch} builds for that")
    order = lambda line: (line["rule"], KNOWN.index(line["formats"]))
    made = sorted(lines(options.arch), key=order)
    for line in made:
        emit({"benchmark": "compiled", "arch": options.arch, **line}, options.json)
    print(table([*made[0]], ([*line.values()] for line in made)))
    print(
        "instructions, bytes: of an element; gpt2_us: predicted for 124 million parameters\n"
        f"In the time of 28 bytes {28 / BANDWIDTH * ISSUED:.0f} instructions can be issued for an "
        "element."
    )


if __name__ == "__main__":
    main()
