"""Other ways to write the update kernels, each a program that times it alone: what the comments in
csrc/cuda say was tried.

    python -m benchmarks.variants build FOLDER [--arch 90] [--only NAME ...]     needs nvcc, and no
    GPU python -m benchmarks.variants run FOLDER                                     needs a GPU,
    and nothing else

A variant is the sources with a few lines replaced, compiled for AdamW alone. "Hints": every stream
is marked as used once (ld.global.cs, st.global.cs); those of before spared parameters. A line of
JSON for each kind of numbers: median milliseconds of a launch, bytes a second, and a sum of all
that was written, by which variants of the same arithmetic can be compared. The programs need no
Python and no torch: they can be built on one machine and run on another.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ROOT / "csrc"
Edit = tuple[str, str, str]
"""(file, what is replaced, by what)"""

CODED, VEC, STEP = "cuda/coded.cu", "cuda/vec.cuh", "cuda/step.cuh"
RULES = "core/rules.h"
LONG: Edit = (STEP, "kSliceElements = 2048;", "kSliceElements = 16384;")
HINTS: list[Edit] = [
    (
        VEC,
        "return *global(static_cast<const T*>(stream) + element);",
        "return __ldcs(global(static_cast<const T*>(stream) + element));",
    ),
    (
        VEC,
        "*global(static_cast<T*>(stream) + element) = value;",
        "__stcs(global(static_cast<T*>(stream) + element), value);",
    ),
]
DIVISION: Edit = (CODED, "share_of(shares, x[i])", "x[i] / scale")
ANY_FORMAT: Edit = (CODED, "with_known(plan.known,", "with_known(Known::none,")


def coded_blocks(count: int) -> Edit:
    return CODED, "  return 6;", f"  return {count};"


VARIANTS: dict[str, list[Edit]] = {
    "as it is": [],
    "a block for a chunk": [LONG],
    "1024 elements a block": [(STEP, "kSliceElements = 2048;", "kSliceElements = 1024;")],
    "4096 elements a block": [(STEP, "kSliceElements = 2048;", "kSliceElements = 4096;")],
    "hints": HINTS,
    "hints, a block for a chunk": [*HINTS, LONG],
    "a division for each code": [DIVISION],
    "any format": [ANY_FORMAT],
    "any format, a division for each code": [ANY_FORMAT, DIVISION],
    "4 blocks for codes": [coded_blocks(4)],
    "5 blocks for codes": [coded_blocks(5)],
    "8 blocks for codes": [coded_blocks(8)],
    "8 blocks for float32": [(STEP, "? 5 : 6;", "? 5 : 8;")],
}  # fmt: skip


def edited(edits: Sequence[Edit]) -> dict[str, str]:
    """The sources by file, with these lines replaced, and for AdamW alone."""
    texts = {
        str(path.relative_to(SOURCES)): path.read_text(encoding="utf-8")
        for path in sorted(SOURCES.rglob("*"))
        if path.is_file()
    }
    texts[RULES] = re.sub(r"\n    case Rule::(?!adamw:).*call\(.*", "", texts[RULES])
    for file, old, new in edits:
        if old not in texts[file]:
            raise SystemExit(
                f"python -m benchmarks.variants: {file} has no longer the line {old!r}"
            )
        texts[file] = texts[file].replace(old, new)
    return texts


def program(folder: Path, name: str) -> Path:
    return folder / re.sub(r"[^a-z0-9]+", "-", name)


def build(folder: Path, arch: str, names: Sequence[str]) -> None:
    from hdet.kernels.numbers import codebook

    nvcc = shutil.which("nvcc")
    if nvcc is None:
        raise SystemExit("python -m benchmarks.variants: nvcc was not found")
    for name in names:
        target = program(folder, name)
        sources = Path(f"{target}.src")
        for file, text in edited(VARIANTS[name]).items():
            (sources / file).parent.mkdir(parents=True, exist_ok=True)
            (sources / file).write_text(text, encoding="utf-8")
        (sources / "codebooks.inc").write_text(
            ",".join(map(str, codebook().flatten().tolist())), encoding="utf-8"
        )
        flags = [
            "-std=c++17",
            "-O3",
            "-fmad=false",
            f"-gencode=arch=compute_{arch},code=sm_{arch}",
            f"-I{sources}",
        ]
        flags += [f'-DHDET_VARIANT_NAME="{name}"']
        subprocess.run(
            [nvcc, *flags, "-o", str(target), str(Path(__file__).with_suffix(".cu"))], check=True
        )
        print(f"built: {target}", flush=True)


def run(folder: Path) -> None:
    programs = [path for path in (program(folder, name) for name in VARIANTS) if path.exists()]
    if not programs:
        raise SystemExit(
            f"python -m benchmarks.variants: {folder} has none of the programs that `build` makes"
        )
    for path in programs:
        subprocess.run([str(path)], check=True)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("action", choices=["build", "run"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--arch", default="90", help="compute capability without its dot")
    parser.add_argument(
        "--only",
        nargs="+",
        choices=list(VARIANTS),
        default=list(VARIANTS),
        metavar="NAME",
        help="of the variants",
    )
    given = parser.parse_args(arguments)
    if given.action == "run":
        run(given.folder)
    else:
        build(given.folder, given.arch, given.only)


if __name__ == "__main__":
    sys.exit(main())
