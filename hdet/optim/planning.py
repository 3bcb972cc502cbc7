"""Plans of an optimizer's steps: made when its tensors change, and kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hdet import kernels
from hdet.kernels import StepTensors
from hdet.rules import RULES, Facts, Kind
from hdet.tensors import dtensor as shards
from hdet.tensors import strides

from . import step_plans as plans
from .masters import Watch
from .moment_storage import scale_key
from .stateful import Stateful
from .step_plans import Hyper, Member, Part, Planned


class Planning(Stateful):
    """What a step relies on."""

    _planned: Planned | None

    def _forget(self) -> None:
        super()._forget()
        self._planned = None

    def _hypers(self, kinds: Sequence[Kind]) -> list[Hyper]:
        count = len(self.param_groups)
        if len(self.multipliers) != self.num_replicas:
            raise ValueError(
                f"multipliers has {len(self.multipliers)} lists for {self.num_replicas} replicas: "
                "multipliers[replica][group]"
            )
        for k, row in enumerate(self.multipliers):
            if len(row) != count:
                raise ValueError(
                    f"multipliers[{k}] has {len(row)} entries for {count} parameter groups"
                )
        pairs = zip(kinds, self.param_groups, strict=True)
        return [self._values(kind.rule, group) for kind, group in pairs]

    def _values(self, rule: Facts, group: dict[str, Any]) -> Hyper:
        """Of the next step, in the order of the rule's `fields`."""
        return rule.values(group)

    def _settings_of(self, planned: Planned) -> Sequence[Sequence[Any]]:
        """What the plan of each part takes, checked as far as it does not check by itself."""
        return planned.settings_of(
            self._hypers(planned.kinds),
            self.multipliers,
            (self.decay_at == "base", self.cautious_decay),
        )

    def _plan_for(self, params: list[Tensor], absent: list[int]) -> Planned:
        """A plan is for all parameters that have had a gradient since the last change of tensors,
        so that each is planned for once."""
        sizes = [len(group["params"]) for group in self.param_groups]
        kinds = [self._rule_of(group).kind(group) for group in self.param_groups]
        planned, kept = self._planned, []
        if planned is not None and planned.holds(self.state, params, sizes, kinds):
            if planned.outside.issubset(absent):
                return planned
            kept = planned.places
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "this step has not been planned yet: run one step with the same parameters before "
                "capturing it"
            )
        return self._plan(
            params, sizes, kinds, sorted(set(range(len(params))).difference(absent).union(kept))
        )

    def _plan(
        self, params: list[Tensor], sizes: list[int], kinds: list[Kind], chosen: list[int]
    ) -> Planned:
        """Plans for the parameters at these places, and what is to be added to their states once a
        step has been done."""
        group_of = [group for group, size in enumerate(sizes) for _ in range(size)]
        members, entries = {}, {}
        for i in chosen:
            kept, sets = self.state.get(params[i], {}), self._replicas_of(params[i])
            entries[i] = self._layout(params[i]).missing(
                kept, sets, kinds[group_of[i]].keeps_moments
            )
            state = {
                key: value for key, value in {**kept, **entries[i]}.items() if value is not None
            }
            members[i] = Member(group_of[i], sets, state)
        by_device = plans.by_device(params, chosen).items()
        parts = [
            part
            for device, places in by_device
            for part in self._parts(device, {i: members[i] for i in places})
        ]
        parts.sort(key=lambda part: part.in_turns)  # last: kernels may still refuse
        others = [
            (param, self.state[param])
            for i, param in enumerate(params)
            if i not in members and param in self.state
        ]
        watch = Watch([*((params[i], member.state) for i, member in members.items()), *others])
        return Planned(params, sizes, kinds, parts, members, entries, watch, self.state)

    def _parts(self, device: torch.device, members: dict[int, Member]) -> list[Part]:
        """Plans for parameters of one device, by place."""
        kernels.select(self.backend, device)
        places, chosen = list(members), list(members.values())
        numbers, groups_of = plans.numbered([member.group for member in chosen])
        own = [
            strides.laid_state(shards.local_state(state, sets[0]), shards.local(sets[0]))
            for _, sets, state in chosen
        ]
        all_groups = self.param_groups
        keeps = [RULES[self.rule].keeps_moments(all_groups[member.group]) for member in chosen]
        tensors = self._tensors([member.sets for member in chosen], own, numbers, keeps, places)
        plan = kernels.step_plan(tensors, self.backend)
        return [Part(plan, places, groups_of, device)]

    def _tensors(
        self,
        sets: list[list[Tensor]],
        states: list[dict[str, Any]],
        groups: list[int],
        keeps: list[bool],
        places: list[int],
    ) -> StepTensors:
        """What one plan works on.

        `states`: as they lie on this rank, in its memory's order. `keeps`: has the tensor moments?
        `places`: its number among all parameters."""
        count = self.num_replicas
        keepers = [state if keep else {} for state, keep in zip(states, keeps, strict=True)]
        rule = RULES[self.rule]
        draws = self.moment_dtype == torch.bfloat16 and not all(rule.signed)
        return StepTensors(
            rule=self.rule,
            params=strides.laid_columns([[shards.local(s[k]) for s in sets] for k in range(count)]),
            groups=groups,
            steps=[state["step"] for state in states],
            moments=[plans.column(keepers, key) for key in rule.moments],
            masters=plans.master_columns(states, count),
            ids=places,
            stochastic=self.seed if self.stochastic_rounding or draws else None,
            first_replica=self.first_replica,
            scales=[plans.column(keepers, scale_key(key)) for key in rule.moments],
        )
