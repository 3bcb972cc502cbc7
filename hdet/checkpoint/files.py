"""save and load: collective, atomic, verified."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from ..converge.health import digest
from ..core.validate import whole
from ..owned_folder import MARK
from ..tensors.dtensor import is_sharded, local
from .errors import CheckpointError, Together
from .folder import checksums, claim, holds_none, publish, read_manifest, resolve, steps, verify
from .keys import bare
from .run_state import RunState, listed


def save(root: str | os.PathLike[str], state: RunState, step: int | None = None, *, keep: int = 2) -> Path:
    """Write ``root/step-XXXXXXXX``, durably and whole, or not at all. Every rank calls it; ``root`` is on a file system they all see.

    Converges first if the replicas have parted. The folder appears under its name by one rename once all is written, checksummed and
    synced; before that the previous checkpoints are untouched. Then those older than the newest ``keep`` are removed. What a killed
    save has left is removed by the next one. A step that is there already is replaced. Tensors are written once, by ranks in turn.
    Only folders that hdet has written are removed, replaced or counted: not another program's, and no links.

    Args:
        step: what `load` returns; by default the steps that the Ensemble has counted, which a checkpoint continues.
        keep: how many checkpoints to keep, this one included.

    Returns:
        The folder, on every rank, once it is durable.

    Raises:
        ValueError: ``step`` is negative or ``keep`` below 1.
        CheckpointError: on every rank alike. Before anything is changed: another process is saving there, which is named; what has the
            checkpoint's name is not hdet's; ``step`` or ``keep`` differ. Later: nothing can be written there, or not all ranks see what
            has been; or ranks differ in what they should have in common (an optimizer's state that is not private, a frozen parameter),
            which a checkpoint would mix.
    """
    if not isinstance(state, RunState):
        raise TypeError(f"state must be an hdet.checkpoint.RunState, got {type(state).__name__}")
    step = state.ensemble.engine.step if step is None else whole(step, "step", 0)
    whole(keep, "keep")
    folder = Path(root)
    final = folder / f"step-{step:08d}"
    together = Together(state.ensemble.replicas.world_group)
    with ExitStack() as held:

        def hold() -> None:
            held.enter_context(claim(folder, final))

        with state.ensemble.during("checkpoint"):
            asked = set(together.all(lambda: (step, keep)))
            if len(asked) > 1:
                raise CheckpointError(f"save was called with different (step, keep) on different ranks: {sorted(asked)}")
            together.first(hold)
        if not state.ensemble.in_sync:
            state.ensemble.converge()
        state.ensemble.reset_loss_meters()  # also where nothing had to be averaged: losses of the running cycle are not in the checkpoint
        with state.ensemble.during("checkpoint"):
            _write(folder, final, state, step, keep, together)
    later = steps(folder)[-1:] if together.rank == 0 else []
    if later and later[0] != final:
        warnings.warn(f"{str(folder)!r} holds a later checkpoint than the one saved now: latest() gives {str(later[0])!r}", stacklevel=2)
    return final


def load(root: str | os.PathLike[str], state: RunState, *, missing: int | None = None) -> int:
    """Continue from a checkpoint: a folder ``step-XXXXXXXX``, or a root, of which the latest is taken. Every rank calls it.

    The manifest and every checksum, names, shapes and settings are verified before model and optimizer are changed. There may be
    another number of replicas: base values, corrections and velocities go on. DTensors may be sharded in another way, too.

    Args:
        missing: the step to begin at, such as 0, where ``root`` holds no checkpoint (or is not there yet). The first rank looks and tells
            all, so that none begins anew while others continue. None: that is an error. A damaged checkpoint is one in any case.

    Returns:
        The step that was given to `save`; or ``missing``, and nothing has been changed.

    Raises:
        ValueError: ``missing`` is negative.
        CheckpointError: on every rank alike, in one line: there is none, it is damaged (an older one is named, never taken silently),
            of another version, or of another model, optimizer or Ensemble.
    """
    if not isinstance(state, RunState):
        raise TypeError(f"state must be an hdet.checkpoint.RunState, got {type(state).__name__}")
    if missing is not None:
        whole(missing, "missing", 0)
    with state.ensemble.during("checkpoint"):
        return _read(Path(root), state, missing)


def _read(path: Path, state: RunState, missing: int | None) -> int:
    from torch.distributed import checkpoint as dcp

    from .reader import Planner, Reader

    group = state.ensemble.replicas.world_group
    together = Together(group)
    opened = together.first(lambda: missing if missing is not None and holds_none(path) else _opened(path))
    if isinstance(opened, int):
        return opened
    folder, manifest = opened
    verify(folder, manifest["files"], together)
    reader = Reader(folder, {name: facts["bytes"] for name, facts in manifest["files"].items()})

    def read(tree: dict[str, Any]) -> dict[str, Any]:
        with _one_line("reading", folder):
            dcp.load(tree, storage_reader=reader, planner=Planner(), process_group=group, no_dist=group is None)
        return tree

    def fits(function: Callable[[], Any]) -> Any:
        try:
            return together.each(function)
        except CheckpointError as error:
            raise CheckpointError(f"checkpoint {str(folder)!r} does not fit this run: {error}") from error

    plans: _Destinations = fits(lambda: _Destinations(state, manifest, reader.read_metadata()))
    plain = read(fits(plans.plain))
    tensors: dict[str, Any] = fits(plans.tensors)
    fits(lambda: state.load_plain(plain))
    read(tensors)
    fits(lambda: state.load_tensors({**plain, **tensors, "optimizer": {**plain["optimizer"], **tensors["optimizer"]}}))
    step: int = manifest["step"]
    return step


def _opened(path: Path) -> tuple[Path, dict[str, Any]]:
    folder = resolve(path)
    return folder, read_manifest(folder)


@contextmanager
def _one_line(doing: str, folder: Path) -> Iterator[None]:
    """torch's CheckpointException, which is no Exception and prints every rank's traceback, as one of ours."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            yield
    except CheckpointException as error:
        rank, (cause, _) = min(error.failures.items())
        text = (str(cause).strip() or "no message").splitlines()[0]
        raise CheckpointError(f"{doing} {str(folder)!r} failed on rank {rank}: {type(cause).__name__}: {text}") from error


# -- what is written -----------------------------------------------------------------------------------------------------


def _write(folder: Path, final: Path, state: RunState, step: int, keep: int, together: Together) -> None:
    from torch.distributed import checkpoint as dcp

    from .. import __version__

    group = together.group
    partial = folder / f".{final.name}.partial"
    tree = _equal_tree(state, together)
    with _one_line("writing", partial):
        dcp.save(tree, storage_writer=dcp.FileSystemWriter(partial), process_group=group, no_dist=group is None)
    sums = checksums(partial, together.first(lambda: _written(partial)), together)
    if unseen := [name for name, facts in sums.items() if facts["bytes"] is None]:
        raise CheckpointError(
            f"{str(folder)!r} is not one folder for all ranks: {unseen[0]!r} has been written there, and is not seen by all"
        )
    facts: dict[str, Any] = {"hdet": __version__, "torch": str(torch.__version__), "step": step}
    facts |= {"replicas": state.ensemble.replicas.count, "members": state.keys.members}
    together.first(lambda: publish(final, facts, sums, keep))


def _written(partial: Path) -> list[str]:
    """Names of all files that torch's index speaks of, whoever wrote them, and of the index."""
    from .reader import read_index

    stored = read_index(partial).storage_data.values()
    return sorted({entry.name for entry in partial.iterdir() if entry.name != MARK} | {info.relative_path for info in stored})


def _equal_tree(state: RunState, together: Together) -> dict[str, Any]:
    """The state, once it is known that what is stored once is equal on all ranks that hold it."""
    trees = []

    def described() -> dict[str, Any]:
        tree = state.state_dict()
        trees.append(tree)
        entries = [(key, value) for key, values in tree["optimizer"]["state"].items() for value in values.values()]
        kept = digests(tree.get("converge", {}).items())
        return {"the parameters": digests(tree["model"].items()), "the optimizer's state": digests(entries), "the outer momenta": kept}

    check_equal(described, state.keys.replicas.member, together)
    return trees[0]


def check_equal(describe: Callable[[], Mapping[str, Any]], member: int, together: Together) -> None:
    """Raises CheckpointError, on all ranks alike, where `digests` that should be equal are not. One small collective."""
    rows = together.all(lambda: (member, describe()))
    for what in rows[0][1]:
        for scope in range(2):
            seen: dict[Any, tuple[int, Any]] = {}
            for rank, (place, row) in enumerate(rows):
                first, mark = seen.setdefault(place if scope else None, (rank, row[what][scope]))
                if row[what][scope] != mark:
                    raise CheckpointError(
                        f"{what} differ between ranks {first} and {rank}, which should hold the same after a converge: a checkpoint would mix "
                        "them. Gradients must be reduced over all replicas, or the Ensemble made with gradients='local'"
                    )


def digests(named: Iterable[tuple[str, Any]]) -> tuple[Any, Any]:
    """Of tensors by key: one of what all ranks have alike, and one of what the same member of each replica has."""
    shared = [(key, t) for key, t in named if isinstance(t, torch.Tensor) and not key.startswith("replica") and not t.is_complex()]
    # Whole DTensors are equal shard by shard, on the same member; plain tensors without a prefix on every rank.
    everywhere = [t for key, t in shared if not key.startswith("member") and not is_sharded(t)]
    return tuple(digest(everywhere).tolist()), tuple(digest([local(t) for _, t in shared]).tolist())


# -- what is read, and into which tensors -------------------------------------------------------------------------------------------------


class _Destinations:
    """Trees for torch's load to fill, made from what a checkpoint has: the optimizer need not have been stepped."""

    def __init__(self, state: RunState, manifest: Mapping[str, Any], metadata: Any) -> None:
        self.state, self.keys = state, state.keys
        self.replicas, self.members = manifest["replicas"], manifest["members"]
        self.sizes = metadata.state_dict_metadata
        self.below: dict[tuple[str, str], dict[str, tuple[Any, ...]]] = {}
        """(section, key) -> flat name -> the path within: what the checkpoint has for a key"""
        for flat, path in metadata.planner_data.items():
            depth = 3 if path[:2] == ("optimizer", "state") else 2
            if len(path) >= depth:
                self.below.setdefault((".".join(path[: depth - 1]), str(path[depth - 1])), {})[flat] = path[depth:]

    def plain(self) -> dict[str, Any]:
        tree: dict[str, Any] = {"ensemble": b""}
        own = self._own("").rstrip("/") or "all"
        about = next((key for key in self.state.about_keys(self._replica()) if f"optimizer.about.{key}" in self.sizes), None)
        if about is None:
            raise ValueError(
                f"it was saved with replicas of {self.members} ranks, this run's have {self.keys.members}, "
                "and tensors that are not DTensors are not cut anew: use the saved layout"
            )
        tree["optimizer"] = {"about": {about: b""}}
        for section, wanted in (("extra", self.state.extra is not None), ("modules", any(f.startswith("modules.") for f in self.sizes))):
            if wanted:
                found = next((key for key in (own, "all", "replica0/member0") if f"{section}.{key}" in self.sizes), None)
                if found is None:
                    raise ValueError(f"it has no {section}: make the RunState as the saved run did")
                tree[section] = {found: b""}
        return tree

    def tensors(self) -> dict[str, Any]:
        return {"model": self._model(), "optimizer": {"state": self._optimizer()}, **self._converge()}

    def _replica(self) -> int:
        """Whose optimizer state is taken, where each replica has one. Shared gradients need the same everywhere."""
        return self.keys.replicas.index % self.replicas if self.state.ensemble.sync.gradients == "local" else 0

    def _own(self, name: str) -> str:
        """``name`` under this rank's prefix in the saved run; replica and member modulo the numbers saved."""
        return self.keys.of_rank(self.replicas, self.members) + name

    def _model(self) -> dict[str, torch.Tensor]:
        ours, missing = {}, []
        for key, tensor in self.state.model_tensors().items():
            name = bare(key)
            candidates = (
                (self._own(name), f"replica0/member0/{name}", name) if key.startswith("replica") else (key, f"replica0/member0/{key}")
            )
            found = next((c for c in candidates if f"model.{c}" in self.sizes), None)
            if found is None:
                missing.append(key)
                continue
            size = self.sizes[f"model.{found}"].size
            if size != tensor.shape:
                raise ValueError(f"{key!r} has the shape {tuple(size)} there and {tuple(tensor.shape)} here")
            ours[found] = tensor
        member = f"member{self.keys.replicas.member}/"
        theirs = [key for section, key in self.below if section == "model" and key.startswith((member, bare(key)))]
        unknown = [key for key in theirs if key not in ours]
        if missing or unknown:
            raise ValueError(f"it lacks {_few(missing)} and has {_few(unknown)} which the model has not: it is of another model")
        return ours

    def _converge(self) -> dict[str, Any]:
        """Of a run without it nothing is taken, and what this one's way of averaging keeps begins anew."""
        params = self.state.averaged_keys()
        if not all(f"converge.{key}" in self.sizes for key in params):
            return {}
        return {"converge": {key: self._blank(f"converge.{key}", p) for key, p in params.items()}}

    def _optimizer(self) -> dict[str, Any]:
        from torch.distributed.checkpoint._nested_dict import set_element

        tree: dict[str, Any] = {}
        state = self.state
        for name, param in zip(state.parameter_names(), listed(state.optimizer), strict=True):
            shared = self.keys.shared(param) + name
            for key in (shared, f"replica{self._replica()}/{shared}"):
                for flat, path in self.below.get(("optimizer.state", key), {}).items():
                    set_element(tree, (key, *path), self._blank(flat, param))
        return tree

    def _blank(self, flat: str, param: torch.Tensor) -> Any:
        """Memory for an entry; sharded like its parameter if it has the parameter's shape."""
        size = getattr(self.sizes[flat], "size", None)
        if size is None:
            return b""
        dtype = self.sizes[flat].properties.dtype
        if size == param.shape and len(size):
            return torch.empty_like(param.detach(), dtype=dtype, memory_format=torch.contiguous_format)
        return torch.empty(size, dtype=dtype)


def _few(names: list[str]) -> str:
    return "nothing" if not names else ", ".join(map(repr, names[:3])) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
