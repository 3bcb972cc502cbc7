"""Replicas that one optimizer steps together, and masters of their parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hdet.kernels.checks import normalised
from hdet.tensors import dtensor as shards

from . import step_plans as plans
from .finish import Averaging, check_copies
from .masters import REPLICA_KEYS, Watch, kept_masters, like_first, reset_master, state_sets
from .planning import Planning


class Coresident(Planning):
    """K replicas that share gradients and moments."""

    _averaging: dict[torch.device, Averaging]

    def _forget(self) -> None:
        super()._forget()
        self._averaging = {}

    @torch.no_grad()
    def set_replicas(self, count: int, copies: Callable[[Tensor], Sequence[Tensor]]) -> None:
        """Steps K = `count` replicas that share gradients and moments from now on; multipliers are
        1.

        copies: gives for a parameter its K tensors, of which the first is the parameter itself;
        alike, on one device, apart in memory.

        Adam and SGD need weight_decay 0: theirs is part of the gradient, which replicas share.
        """
        sets = {param: check_copies(param, copies(param), count) for param in self._listed()}
        self.num_replicas, self._sets = count, sets if count > 1 else {}
        for param in sets:
            state = (
                self.state[param]
                if param in self.state or (count > 1 and param.requires_grad)
                else {}
            )
            for key in REPLICA_KEYS:
                state.pop(key, None)
            if count > 1 and param.requires_grad:
                state["replica_params"] = sets[param][1:]
                if masters := kept_masters(state):
                    first, master = shards.local(param), shards.local(masters[0])
                    made = [
                        like_first(shards.local(copy), first, master) for copy in sets[param][1:]
                    ]
                    state["replica_masters"] = [shards.like(one, param) for one in made]
        self.multipliers = [[1.0] * len(self.param_groups) for _ in range(count)]
        self._forget()

    def replica_parameters(self, k: int) -> list[Tensor]:
        """The parameters of replica k, in the order of the parameter groups; replica 0 is the
        model's own."""
        if not 0 <= k < self.num_replicas:
            raise ValueError(
                f"replica {k} does not exist: there are {self.num_replicas}, numbered from 0"
            )
        return [self._replicas_of(param)[k] for param in self._listed()]

    @torch.no_grad()
    def average_replicas(self, weights: Sequence[float]) -> None:
        """Every replica becomes sum_k weights[k] * replica k (Eq. 3), masters and parameters.
        The weights are divided by their sum; a replica of weight 0 is not read. Moments and
        counters are shared and stay. Frozen parameters are left alone."""
        shares = normalised(weights, self.num_replicas)
        self._take_over()
        if self.num_replicas == 1:
            return
        params = [
            param
            for param in self._listed()
            if param.requires_grad or "step" in self.state.get(param, {})
        ]
        for device, places in plans.by_device(params, range(len(params))).items():
            chosen = [params[i] for i in places]
            sets = [
                [self._replicas_of(param)[k] for param in chosen] for k in range(self.num_replicas)
            ]
            states = [shards.local_state(self.state.get(param, {}), param) for param in chosen]
            masters = plans.master_columns(states, self.num_replicas)
            self._averaging.setdefault(device, Averaging())(sets, masters, shares, self.backend)
        if self._planned is not None:
            self._planned.watch.refresh()

    @torch.no_grad()
    def masters(self, params: Sequence[Tensor], replica: int = 0) -> list[Tensor | None]:
        """The master of each of these parameters in that replica: float32, or int16 (the lower half
        of a split one), or None.

        What has been written to parameters in place is taken over first, so that masters say what
        the model is now. Tensors that the optimizer does not step, and states before their first
        step, have None. Of a DTensor: the shard of its master on this rank.
        """
        if self.master_weights is None:
            return [None] * len(params)
        self._take_over()
        kept = [kept_masters(self.state.get(param, {})) for param in params]
        return [
            shards.local(masters[replica]) if replica < len(masters) else None for masters in kept
        ]

    @torch.no_grad()
    def refresh_masters(self) -> None:
        """Masters become exactly what the parameters are: after writing to them in a way that is
        not noticed (see the class)."""
        for param, state in self.state.items():
            for tensor, master in zip(state_sets(state, param), kept_masters(state), strict=False):
                reset_master(tensor, master)

    def _take_over(self) -> None:
        if self._planned is not None:
            self._planned.watch.check()
        else:
            Watch(
                [(param, self.state[param]) for param in self._listed() if param in self.state]
            ).check()
