"""Which parameters FusedMuon steps as matrices, and which by AdamW."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim.optimizer import ParamsT

from hdet.rules import RULES, Facts, Kind

UseMuon = Callable[[str, Tensor], bool]

OF_SHAPES = ("higher_dims", "splits")


class _Matrices(Facts):
    def kind(self, group: Mapping[str, Any]) -> Kind:
        return Kind(self, True, str([group.get(key) for key in OF_SHAPES]))


MATRICES = _Matrices(
    ("momentum_buffer",),
    {
        "lr": 1e-3,
        "weight_decay": 0.1,
        "momentum": 0.95,
        "nesterov": True,
        "ns_coefficients": (3.4445, -4.7750, 2.0315),
        "eps": 1e-7,
        "ns_steps": 5,
        "adjust_lr_fn": None,
    },
)
"""torch.optim.Muon's"""
KEYS = {True: tuple(MATRICES.settings), False: RULES["adamw"].keys}
"""what a group must have, by its `use_muon`"""

_TABLES = ("wte", "wpe")
_HEADS = ("head", "lm_head", "classifier", "score", "unembed", "unembedding")
_WRAPPERS = ("module", "model", "_orig_mod")
_OF_BOTH = ("name", *OF_SHAPES)
"""what a group may say that is split by its parameters' names"""


def _is_expert(name: str) -> bool:
    return "expert" in name.lower()


def hidden_matrix(name: str, param: Tensor) -> bool:
    """Is this a matrix inside of a model, as far as its name tells? The default rule of
    `FusedMuon`.

    Yes for two dimensions, and for three where "expert" is in the name (a stack of matrices). No
    for fewer, for other parameters of three and more (convolutions), and where a component of the
    dotted name says embedding or output layer: a word of it, between underscores, begins with
    "emb"; it is wte, wpe, head, lm_head, classifier, score, unembed or unembedding; or it is output
    and the first one. An output layer of another name is not known: pass `use_muon`.
    """
    parts = [part.lower() for part in name.split(".")]
    if not (param.ndim == 2 or (param.ndim == 3 and _is_expert(name))):
        return False
    first = next((part for part in parts if part not in _WRAPPERS), "")
    return not (
        first == "output"
        or any("_emb" in f"_{part}" or part in (*_TABLES, *_HEADS) for part in parts)
    )


def hidden_matrices(model: nn.Module) -> UseMuon:
    """A rule for `FusedMuon` that knows the modules, and not their names alone::

        hdet.FusedMuon(model.named_parameters(), use_muon=hdet.hidden_matrices(model))

    Yes for what `hidden_matrix` takes, but for tables (nn.Embedding, nn.EmbeddingBag, and a matrix
    that shares one's weight), for matrices whose rows are as many as a table's (the output layer of
    a language model), and for the last nn.Linear of the model (that of a classifier). What is a
    parameter of the outermost module itself, such as positions, is none either.
    """
    modules = list(model.modules())
    tables = [
        module.weight for module in modules if isinstance(module, (nn.Embedding, nn.EmbeddingBag))
    ]
    last = [module.weight for module in modules if isinstance(module, nn.Linear)][-1:]
    own = [*model.parameters(recurse=False), *tables, *last]
    outside = {
        id(param): param for param in own
    }  # held, so that no other tensor gets the address of one
    rows = {len(table) for table in tables}
    return lambda name, param: (
        hidden_matrix(name, param)
        and id(param) not in outside
        and not (param.ndim == 2 and len(param) in rows)
    )


def split_groups(
    params: ParamsT, use_muon: UseMuon | None, higher_dims: str | None = None
) -> list[dict[str, Any]]:
    """Groups that all say use_muon; none for no parameters, which torch refuses.

    Raises ValueError for matrices of which nobody says what they are.
    """
    entries: Sequence[Any] = list(params)
    if entries and not isinstance(entries[0], dict):
        made = _split({"params": entries}, 0, use_muon, higher_dims)
        if use_muon is None and isinstance(entries[0], tuple):
            _warn_of_output_layer(entries, made)
        return made
    return [
        made for i, group in enumerate(entries) for made in _split(group, i, use_muon, higher_dims)
    ]


def _warn_of_output_layer(
    named: Sequence[tuple[str, Tensor]], groups: Sequence[dict[str, Any]]
) -> None:
    """Where names of a whole model tell neither embedding nor output layer, as those of
    nn.Sequential. Where all are matrices, somebody has chosen them."""
    matrices = [name for name, param in named if param.ndim == 2]
    others = [one for group in groups if not group["use_muon"] for one in group["params"]]
    if matrices and others and not any(param.ndim == 2 for _, param in others):
        warnings.warn(
            f"no parameter's name says embedding or output layer, so Muon steps {matrices[-1]!r} "
            "too: if that is the output layer, pass use_muon=hdet.hidden_matrices(model)",
            stacklevel=4,
        )


def _split(
    group: dict[str, Any], number: int, use_muon: UseMuon | None, higher_dims: str | None
) -> list[dict[str, Any]]:
    if "use_muon" in group:
        return [group]
    given = group["params"]
    entries = [given] if isinstance(given, Tensor) else list(given)
    places = [f"parameter {i} of group {number}" for i in range(len(entries))]
    named = list(map(name_and_param, entries, places))
    # what torch.optim.Muon takes: tensors of two dimensions, and no names
    plain = all(isinstance(entry, Tensor) and entry.ndim == 2 for entry in entries)
    if use_muon is None and not plain:
        _check_names(named, places)
    rule = use_muon or hidden_matrix
    chosen = [(use_muon is None and plain) or bool(rule(*pair)) for pair in named]
    kinds = [use for use in (True, False) if use in chosen] or [False]
    settings = {key: value for key, value in group.items() if key != "params"}
    pairs = zip(named, chosen, strict=True)
    experts = {_is_expert(name) for (name, p), is_matrix in pairs if is_matrix and p.ndim > 2}
    of_muon: dict[str, Any] = {}
    if len(experts) == 1:
        of_muon = {"higher_dims": "stack" if True in experts else higher_dims}
    elif experts:  # of which some are experts and some are not, the group has to say it
        of_muon = {"higher_dims": None}
    if len(kinds) == 1:
        return [{**of_muon, **settings, "params": entries, "use_muon": kinds[0]}]
    # what would be the setting of both
    both = [key for key in settings if key == "eps" or (use_muon is None and key not in _OF_BOTH)]
    if both:
        raise ValueError(
            f"{', '.join(both)} of group {number} would be that of Muon and of AdamW alike: "
            "give a group for each, with use_muon"
            + (", or pass the argument use_muon" if use_muon is None else "")
        )
    made = []
    for use in kinds:
        mine = [entry for entry, is_matrix in zip(entries, chosen, strict=True) if is_matrix == use]
        others = {*KEYS[not use], *(() if use else OF_SHAPES)}.difference(KEYS[use])
        own = {key: value for key, value in settings.items() if key not in others}
        if "name" in own:
            own["name"] = f"{own['name']}/{'muon' if use else 'adamw'}"
        made.append({**(of_muon if use else {}), **own, "params": mine, "use_muon": use})
    return made


def name_and_param(entry: Any, where: str) -> tuple[str, Tensor]:
    name, param = entry if isinstance(entry, tuple) else ("", entry)
    if not isinstance(param, Tensor):
        raise TypeError(f"{where} is a {type(param).__name__}, not a parameter")
    return name, param


def _check_names(named: Sequence[tuple[str, Tensor]], places: Sequence[str]) -> None:
    for (name, param), where in zip(named, places, strict=True):
        if param.ndim >= 2 and not name:
            raise ValueError(
                f"use_muon is not given, and {where} of shape {tuple(param.shape)} has no name to "
                "tell a hidden matrix from an embedding: pass model.named_parameters(), "
                "use_muon=hdet.hidden_matrices(model), or groups with use_muon=True and "
                "use_muon=False"
            )
