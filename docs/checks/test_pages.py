"""The documents say what is so: their Python blocks run as written, names in the text exist,
messages are those of the code.

A comment in front of a block says how it runs, where one process with toys (toys.py) is
not enough:

    <!-- run: ranks=2 -->         on two ranks of a process group
    <!-- run: torchrun -->        in a worker of torchrun, without a process group
    <!-- not run: the reason -->  not at all; the reason is printed
"""

from __future__ import annotations

import ast
import importlib
import os
import re
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hdet
import pytest
from docs import messages, prose
from tests.distributed import run_ranks, torchrun

from .toys import run, run_by_torchrun, run_on_rank

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(
    r"(?:^<!-- (not )?run: ([^\n]*?) -->\n+)?^([^\S\n]*)```python\n(.*?)^\3```",
    re.MULTILINE | re.DOTALL,
)
NAME = re.compile(r"\bhdet(?:\.[A-Za-z_]\w*)+")
RANGES = (
    "hdet.optimizer.step", "hdet.upload", "hdet.step", "hdet.average", "hdet.copy", "hdet.cycle",
    "hdet.probe", "hdet.trial.train", "hdet.trial.score", "hdet.cycle_stats",
)  # fmt: skip
"""of profilers: they look like Python's names"""


@dataclass(frozen=True)
class Block:
    page: Path
    line: int
    source: str
    how: str
    """What the comment says."""
    left_out: bool

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    found = []
    for m in BLOCK.finditer(text):
        source = re.sub(f"^{m[3]}", "", m[4], flags=re.MULTILINE)
        line = text.count("\n", 0, m.start(4)) + 1
        found.append(Block(page, line, source, m[2] or "", bool(m[1])))
    return found


def adapters() -> set[str]:
    """The public names of hdet.integrations, as they stand in the sources."""
    found = set()
    for name in hdet.integrations.__all__:
        source = (ROOT / "hdet" / "integrations" / f"{name}.py").read_text(encoding="utf-8")
        [public] = re.findall(r"^__all__ = \[(.*)\]", source, re.MULTILINE)
        found |= {f"hdet.integrations.{name}.{one}" for one in re.findall(r'"(\w+)"', public)}
    return found


ADAPTERS = adapters()
BLOCKS = [block for page in PAGES for block in blocks(page)]


@pytest.mark.parametrize("block", BLOCKS, ids=str)
@pytest.mark.filterwarnings("ignore")
def test_the_block_runs_as_written(block: Block) -> None:
    if block.left_out:
        assert len(block.how.split()) > 3, "a reason, please"
        pytest.skip(block.how)
    code = block.source, str(block)
    if block.how == "torchrun":
        torchrun(run_by_torchrun, 1, *code)
    elif block.how:
        run_ranks(run_on_rank, int(block.how.removeprefix("ranks=")), *code)
    else:
        run(*code)


def examples(path: Path) -> list[Block]:
    """Those of a module's docstrings."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and node.body:
            docstring, line = ast.get_docstring(node) or "", node.body[0].lineno
            for source in EXAMPLE.findall(docstring + "\n"):
                found.append(Block(path, line, textwrap.dedent(source), node.name, False))
    return found


EXAMPLE = re.compile(r"^Example::\n\n((?:(?: {4}.*)?\n)+)", re.MULTILINE)
EXAMPLES = [
    example
    for path in sorted((ROOT / "hdet").rglob("*.py"))
    if "integrations" not in path.parts  # whose frameworks have their own pages
    for example in examples(path)
]
NO_EXAMPLE = {
    "Run", "Evidence", "Decision", "Plan",  # those of a controller are in Controller's example
    "Averaging", "Averager", "Task",  # docs/adding-an-average.md
    "Measurement",  # docs/adding-a-controller.md
    "BoundKnob", "GroupKnob", "Meaning",  # docs/adding-a-knob.md
    "Backend", "StepTensors", "StepOptions", "StepSettings", "StepPlan", "AveragePlan",
    "CopyPlan",  # those of plans are in step_plan's, average_plan's and copy_plan's
    "ProbeRule",  # ProbeController's
    "Prepared", "Wrapped",  # made by prepare and wrap
    "Trained",  # AdapterContract's
}  # fmt: skip


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda one: f"{one}:{one.how}")
@pytest.mark.filterwarnings("ignore")
def test_the_example_of_a_docstring_runs_as_written(example: Block) -> None:
    run(example.source, str(example))


def test_every_class_of_the_reference_has_an_example() -> None:
    pages = "\n".join(p.read_text(encoding="utf-8") for p in (ROOT / "docs/api").glob("*.md"))
    shown = {
        name.rpartition(".")[2] for name in re.findall(r"^::: hdet\.(\S+)$", pages, re.MULTILINE)
    }
    without, has = set(), set()
    for path in (ROOT / "hdet").rglob("*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and node.name in shown:
                is_error = node.name.endswith(("Error", "Lost", "Diverged", "Disagreement"))
                shows = "::\n\n    " in (ast.get_docstring(node) or "")
                (has if shows or is_error else without).add(node.name)
    assert without - has <= NO_EXAMPLE, without - has - NO_EXAMPLE
    assert len(EXAMPLES) > 30


def test_all_blocks_are_found() -> None:
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    assert len(BLOCKS) == text.count("```python") > 20
    assert len([block for block in BLOCKS if block.how]) == len(re.findall("-- (not )?run:", text))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_names_in_the_text_exist(page: Path) -> None:
    missing = []
    for name in sorted(set(NAME.findall(page.read_text(encoding="utf-8"))) - set(RANGES)):
        owner: Any = hdet
        for part in name.split(".")[1:]:
            if owner is hdet.integrations:  # whose frameworks may not be here
                if name not in ADAPTERS and name.rpartition(".")[2] not in owner.__all__:
                    missing.append(name)
                break
            try:
                if not hasattr(owner, part):
                    importlib.import_module(f"{owner.__name__}.{part}")
                owner = getattr(owner, part)
            except (ImportError, AttributeError):
                missing.append(name)
                break
    assert not missing, missing


def test_the_reference_has_every_public_name() -> None:
    text = "\n".join(p.read_text(encoding="utf-8") for p in (ROOT / "docs/api").glob("*.md"))
    shown = re.findall(r"^::: hdet\.(\S+)$", text, re.MULTILINE)
    assert "optim.classes" in shown  # all of that module
    shown += hdet.optim.classes.__all__
    modules = {"checkpoint", "converge", "integrations", "kernels", "logging"}
    wanted = set(hdet.__all__) - modules - {"optim", "__version__"}
    for module in modules - {"integrations"}:
        wanted |= {f"{module}.{name}" for name in getattr(hdet, module).__all__}
    wanted |= {name.removeprefix("hdet.") for name in ADAPTERS}
    assert not wanted - set(shown), f"add them to docs/api: {sorted(wanted - set(shown))}"
    assert len(shown) == len(set(shown))


def test_messages_in_troubleshooting_are_those_of_the_code() -> None:
    source = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "hdet").rglob("*.py"))
    source = re.sub(r'"\s*\n\s*(?:\+ )?f?"', "", source)  # a message that goes on in the next line
    pages = [path for path in PAGES if path.stem.startswith(("troubleshooting", "errors"))]
    page = "\n".join(path.read_text(encoding="utf-8") for path in pages)
    shown = re.findall(r"^\| `([^`]+)` \|", page, re.MULTILINE)
    parts = [part for message in shown for part in message.split(" … ")]
    missing = [part for part in parts if part not in source]
    assert len(shown) > 30 and not missing, missing
    assert len(list(messages.messages())) > 30, "the site lists them"


def said(path: Path) -> set[str]:
    """What a module of hdet.trial says of a rate, between the values that it puts in: its reasons,
    the lines of reports, and warnings. Texts of at least three words."""
    tree, texts = ast.parse(path.read_text(encoding="utf-8")), set[str]()
    speaking = {"interval", "__str__", "plan", "report", "name_outliers"}
    for node in ast.walk(tree):
        is_reason = isinstance(node, ast.Assign) and any(
            name in ast.unparse(node.targets[0]) for name in ("given_up", "NOT_THE_RATE")
        )
        is_warning = isinstance(node, ast.Call) and ast.unparse(node.func) == "warn"
        speaks = isinstance(node, ast.FunctionDef) and node.name in speaking
        if speaks or is_reason or is_warning:
            docstring = ast.get_docstring(node, clean=False) if speaks else None
            texts |= {
                part.value.removeprefix("AutoLR:").strip(" :\n")
                for part in ast.walk(node)
                if isinstance(part, ast.Constant)
                and isinstance(part.value, str)
                and part.value != docstring
            }
    return {text for text in texts if len(re.findall(r"[a-z']+", text)) > 2}


def test_the_page_of_reasons_has_every_reason() -> None:
    page = (ROOT / "docs" / "why.md").read_text(encoding="utf-8")
    texts = set.union(*(said(path) for path in (ROOT / "hdet" / "trial").glob("*.py")))
    missing = {text for text in texts if text not in page}
    assert len(texts) > 15 and not missing, missing
    source = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "hdet").rglob("*.py"))
    source = re.sub(r'"\s*\n\s*f?"', "", source)
    shown = [part for quoted in re.findall(r"^\| .*?`([^`]+)` \|", page, re.MULTILINE)
             for part in quoted.split("…")]  # fmt: skip
    unknown = [part for part in shown if part.strip(" .()%") not in source]
    assert not unknown, unknown


def test_documents_docstrings_and_messages_have_our_words() -> None:
    source = 'def f():\n    """Take it back."""\n    raise ValueError(f"no {x} is a judge")\n'
    assert prose.unwanted(prose.texts(source)) == ["'judge': write held-out loss, decide"]
    assert prose.main() == 0, "see what it prints"


FENCED = re.compile(r"^```([^\n]*)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def test_code_of_the_site_has_at_most_80_columns() -> None:
    """So that no argument is cut at the edge of a page. README is read elsewhere."""
    codes = [(str(one), one.source) for one in EXAMPLES]
    for page in PAGES[1:]:
        found = FENCED.findall(page.read_text(encoding="utf-8"))
        # "text" is what a command prints
        codes += [(str(page), code) for language, code in found if language != "text"]
    long = [f"{at}: {line}" for at, code in codes for line in code.splitlines() if len(line) > 80]
    assert not long, "\n".join(long)


def test_readme_and_how_to_pages_are_short_and_all_pages_are_not_long() -> None:
    assert len(PAGES[0].read_text(encoding="utf-8").split()) < 600, "two minutes"
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    how_to = navigation.partition("  - How-to:")[2].partition("  - Reference:")[0]
    names = [*re.findall(r": (\S+\.md)$", how_to, re.MULTILINE), "extending.md"]
    names += [path.name for path in (ROOT / "docs").glob("adding-*.md")]
    words = {
        name: len((ROOT / "docs" / name).read_text(encoding="utf-8").split()) for name in names
    }
    assert len(words) > 25 and max(words.values()) <= 900, words
    texts = [FENCED.sub("", page.read_text(encoding="utf-8")) for page in PAGES[1:]]
    assert sum(len(text.split()) for text in texts) < 34_000


def test_the_change_of_the_readme_is_one_of_the_tutorials_loop(tmp_path: Path) -> None:
    """Its lines, in the tutorial's plain loop, run by themselves, in an empty folder and within a
    minute; what the page says that they print is what they print, but for the last digits."""
    readme = PAGES[0].read_text(encoding="utf-8")
    shown = re.compile(r"^```diff\n(.*?)^```.*?^```\n(.*?)^```", re.MULTILINE | re.DOTALL)
    [(diff, printed)] = shown.findall(readme)
    old, new = (
        "".join(line[1:] for line in diff.splitlines(keepends=True) if line[0] in f" {sign}")
        for sign in "-+"
    )
    plain = blocks(ROOT / "docs" / "tutorial" / "one-gpu.md")[0].source
    assert old in plain
    ran = subprocess.run(
        [sys.executable, "-c", "import hdet\n" + plain.replace(old, new)], cwd=tmp_path,
        stdout=subprocess.PIPE, text=True, timeout=60, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert ran.returncode == 0
    number = re.compile(r"\d+(?:\.\d+)?(?:e[-+]?\d+)?")
    found, without_seconds = {}, re.compile(r", [\d.]+ s,")  # which are the machine's
    for line in ran.stdout.splitlines():
        line = without_seconds.sub(",", line)
        found[tuple(number.split(line))] = [float(x) for x in number.findall(line)]
    assert len(printed.splitlines()) > 2
    for line in printed.splitlines():
        line = without_seconds.sub(",", line)
        said = [float(x) for x in number.findall(line)]
        assert found[tuple(number.split(line))] == pytest.approx(said, rel=0.1), line
    held_out = float(number.findall(ran.stdout.splitlines()[-1])[0])
    said = [float(x) for x in re.findall(r"held-out loss is (\S+), without", readme)]
    assert [held_out] == pytest.approx(said, abs=0.02)
