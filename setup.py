"""Builds hdet._C with CMake. Metadata is in pyproject.toml.

Environment:
  HDET_CUDA        0 skips the CUDA kernels; 1 makes it an error where they cannot be compiled;
                   unset compiles them where there is an nvcc of 12.0 or later that works
  HDET_CUDA_ARCHS  compute capabilities, for example "80;90;100" (default: what
                   TORCH_CUDA_ARCH_LIST names, else those of the GPUs present, else 80-virtual;90,
                   whose PTX a driver compiles for newer ones at the first step)
  MAX_JOBS         compilers at a time (default: one for each core)
  HDET_WERROR      1 treats compiler warnings as errors
  CUDA_HOME        the CUDA toolkit to use (also CUDA_PATH); else nvcc from PATH, else
                   /usr/local/cuda
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
DEFAULT_ARCHS = ["80-virtual", "90"]
OLDEST_ARCH = 75
OLDEST_NVCC = (12, 0)
# processor time that the C++ sources take, and for each architecture the CUDA sources: as far as
# PTX, and from there
CPU_SECONDS, PTX_SECONDS, PTXAS_SECONDS = 52, 30, 54


def find_nvcc() -> str | None:
    """The path of nvcc, or None."""
    homes = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    # what the user names goes before what PATH finds, and replaces the usual place
    folders = [
        *(f"{home}/bin" for home in homes),
        os.environ.get("PATH", os.defpath),
        *([] if homes else ["/usr/local/cuda/bin"]),
    ]
    return shutil.which("nvcc", path=os.pathsep.join(folders))


def version_of(nvcc: str) -> tuple[int, int]:
    """(0, 0) for one that does not say."""
    try:
        said = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=False)
    except OSError:
        return 0, 0
    found = re.search(r"release (\d+)\.(\d+)", said.stdout)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def supported_archs(nvcc: str) -> list[str]:
    """Compute capabilities that this nvcc compiles for, for example ["80", "86", ...]."""
    listing = subprocess.run(
        [nvcc, "--list-gpu-arch"], capture_output=True, text=True, check=True
    ).stdout
    return re.findall(r"compute_(\d+)$", listing, re.MULTILINE)


def present_archs() -> list[str]:
    """Compute capabilities of the GPUs in this machine."""
    nvidia_smi = shutil.which("nvidia-smi")
    if nvidia_smi is None:
        return []
    command = [nvidia_smi, "--query-gpu=compute_cap", "--format=csv,noheader"]
    query = subprocess.run(
        command, capture_output=True, text=True, check=False
    )  # without a driver it fails and lists nothing
    return sorted(
        {line.replace(".", "") for line in query.stdout.split() if re.fullmatch(r"\d+\.\d", line)}
    )


def asked_archs() -> tuple[str, list[str]]:
    """The variable that names architectures, and these in CMake's words."""
    for name in ("HDET_CUDA_ARCHS", "TORCH_CUDA_ARCH_LIST"):
        archs = [arch for arch in re.split(r"[;,\s]+", os.environ.get(name, "")) if arch]
        if name.startswith("TORCH"):  # "8.0 9.0+PTX", without names, and what is too old
            archs = [
                arch.removesuffix("+PTX").replace(".", "") + ("" if "+" in arch else "-real")
                for arch in archs
                if re.match(r"\d+\.\d", arch) and not re.match(r"[3-6]\.|7\.[0-4]", arch)
            ]
        if archs:
            return name, archs
    return "", []


def choose_archs(nvcc: str) -> list[str]:
    """What is asked for; else the GPUs present, or the default ones, as far as nvcc supports
    them."""
    name, asked = asked_archs()
    supported = supported_archs(nvcc)
    if asked:
        unknown = [arch for arch in asked if arch.split("-")[0].rstrip("af") not in supported]
        if unknown:
            raise SystemExit(
                f"hdet: {name} names {', '.join(unknown)}, but {nvcc} supports "
                f"{', '.join(supported)}"
            )
        return asked
    for candidates in (
        [arch for arch in present_archs() if int(arch) >= OLDEST_ARCH],
        DEFAULT_ARCHS,
    ):
        usable = [arch for arch in candidates if arch.split("-")[0] in supported]
        if usable:
            return usable
    raise SystemExit(
        f"hdet: {nvcc} supports none of {', '.join(DEFAULT_ARCHS)}; set HDET_CUDA_ARCHS, or "
        "HDET_CUDA=0 to skip CUDA"
    )


def say(text: str) -> None:
    """On the screen, too, where pip shows nothing of what it runs."""
    print(f"hdet: {text}", flush=True)
    if not sys.stdout.isatty():
        with contextlib.suppress(OSError), open("/dev/tty", "w") as screen:
            print(f"hdet: {text}", file=screen)


def needed_time(archs: list[str]) -> str:
    """Of the whole build."""
    seconds = CPU_SECONDS
    for arch in archs:
        seconds += PTX_SECONDS + (0 if arch.endswith("-virtual") else PTXAS_SECONDS)
    jobs = os.environ.get("MAX_JOBS") or os.cpu_count()
    return f"about {seconds} seconds of processor time, shared by {jobs} compilers at a time"


def without_cuda(note: str) -> list[str]:
    """CMake's options; the note is what users are told of the reason."""
    say(f"compiling C++ kernels, {needed_time([])}; no CUDA kernels: {note}")
    return ["-DHDET_CUDA=OFF", f"-DHDET_CUDA_NOTE={note}"]


def check_compiler() -> None:
    named = os.environ.get("CXX")
    names = shlex.split(named)[:1] if named else ["c++", "g++", "clang++", "cl"]
    if not any(map(shutil.which, names)):
        raise SystemExit(
            f"hdet: no C++ compiler was found ({' or '.join(names)}): install one, or a wheel of "
            "hdet, which needs none (docs/install.md, Wheels)."
        )


def insists_on_cuda() -> bool:
    return os.environ.get("HDET_CUDA") == "1"


def cuda_options() -> list[str]:
    """CMake's options for the CUDA kernels, from the environment and the machine."""
    wish = os.environ.get("HDET_CUDA", "")
    if wish not in ("", "0", "1"):
        raise SystemExit(
            f"hdet: HDET_CUDA={wish} is not understood; use 0 (skip CUDA) or 1 (require it), or "
            "leave it unset"
        )
    if wish == "0":
        return without_cuda("hdet was built with HDET_CUDA=0")
    nvcc = find_nvcc()
    if nvcc is None:
        if insists_on_cuda():
            raise SystemExit(
                "hdet: HDET_CUDA=1, but nvcc was not found in CUDA_HOME, CUDA_PATH, PATH or "
                "/usr/local/cuda.\n"
                "Install the CUDA toolkit or point CUDA_HOME at it; without HDET_CUDA=1 hdet "
                "builds without CUDA kernels."
            )
        return without_cuda("nvcc was not found when hdet was built")
    version = version_of(nvcc)
    if version < OLDEST_NVCC and not insists_on_cuda():
        said = ".".join(map(str, version)) if any(version) else "of an unknown version"
        return without_cuda(f"nvcc was {said} when hdet was built, which is older than 12.0")
    archs = choose_archs(nvcc)
    say(
        f"compiling C++ kernels, and CUDA kernels for {';'.join(archs)} with {nvcc}, "
        f"{needed_time(archs)} (HDET_CUDA=0 skips CUDA, HDET_CUDA_ARCHS=90 compiles for a GPU)"
    )
    return [
        "-DHDET_CUDA=ON",
        f"-DHDET_CUDA_ARCHS={';'.join(archs)}",
        f"-DCMAKE_CUDA_COMPILER={nvcc}",
        "-DHDET_CUDA_NOTE=",
    ]


def find_tool(name: str) -> str:
    """cmake or ninja: the one that pip installed for this build, else one on PATH."""
    try:
        module = __import__(name)
        folder = getattr(module, "CMAKE_BIN_DIR", None) or getattr(module, "BIN_DIR", None)
    except ImportError:
        folder = None
    tool = shutil.which(name, path=folder) if folder else None
    tool = tool or shutil.which(name)
    if tool is None:
        raise SystemExit(f"hdet: {name} was not found. Run: pip install {name}")
    return tool


class CMakeBuild(build_ext):
    """Runs CMake in build/cmake-<options> and puts the module where setuptools expects
    it."""

    def build_extension(self, ext: Extension) -> None:
        options = cuda_options()
        check_compiler()
        build = self._configure(options)
        if build is None and "-DHDET_CUDA=ON" in options and not insists_on_cuda():
            build = self._configure(
                without_cuda("nvcc and the C++ compiler did not work together when hdet was built")
            )
        if build is None:
            raise SystemExit(_FAILED.format("cmake could not configure"))
        most = self.parallel or os.environ.get("MAX_JOBS")
        jobs = [f"-j{most}"] if most else []
        if _run(find_tool("cmake"), "--build", build, *jobs) != 0:
            raise SystemExit(_FAILED.format("the native module did not build"))
        target = Path(self.get_ext_fullpath(ext.name)).resolve()
        target.parent.mkdir(parents=True, exist_ok=True)
        # Replaced, not overwritten: a process that has the old module mapped keeps it.
        fresh = target.with_name(target.name + ".new")
        shutil.copyfile(build / target.name, fresh)
        os.replace(fresh, target)

    def _configure(self, cuda: list[str]) -> Path | None:
        """The folder in which CMake can build with these options; None: it cannot."""
        import pybind11

        options = [
            f"-DHDET_VERSION={self.distribution.get_version()}",
            f"-DHDET_WERROR={'ON' if os.environ.get('HDET_WERROR') == '1' else 'OFF'}",
            f"-DCMAKE_BUILD_TYPE={'Debug' if self.debug else 'Release'}",
            *cuda,
        ]
        compilers = [os.environ.get("CXX", ""), os.environ.get("CXXFLAGS", "")]
        tag = hashlib.sha256("\n".join([*options, *compilers]).encode()).hexdigest()[:8]
        build = ROOT / "build" / f"cmake-{tag}"
        # The kernels do not know Python: another one builds on the same objects.
        cache = build / "CMakeCache.txt"
        if cache.exists() and f"={sys.executable}\n" not in cache.read_text(encoding="utf-8"):
            cache.unlink()
        # pip's isolated environments have a new path every time. A copy of the headers keeps one
        # path, and with it the objects.
        include = build / f"pybind11-{pybind11.__version__}"
        if not include.exists():
            shutil.copytree(pybind11.get_include(), f"{include}.new", dirs_exist_ok=True)
            os.rename(f"{include}.new", include)
        sources = runpy.run_path(str(ROOT / "src/hdet/kernels/native/sources.py"))
        options += [
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-DCMAKE_MAKE_PROGRAM={find_tool('ninja')}",
            f"-DHDET_PYBIND11_INCLUDE={include}",
            f"-DHDET_SOURCES={sources['digest_of'](ROOT / 'csrc')}",
        ]
        code = _run(find_tool("cmake"), "-S", ROOT, "-B", build, "-G", "Ninja", *options)
        return build if code == 0 else None


_FAILED = "hdet: {}; the message is above. If it concerns CUDA, HDET_CUDA=0 skips the CUDA kernels."


def _run(*command: object) -> int:
    return subprocess.run([str(part) for part in command], check=False).returncode


if __name__ == "__main__":  # not when a test imports the functions above
    setup(ext_modules=[Extension("hdet._C", sources=[])], cmdclass={"build_ext": CMakeBuild})
