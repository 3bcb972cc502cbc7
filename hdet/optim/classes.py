"""The fused optimizers that are a rule and nothing else."""

# Printed by csrc/generate.py from hdet/rules: change that, and print again.

from __future__ import annotations

from torch import Tensor
from torch.optim.optimizer import ParamsT
from typing_extensions import Unpack

from .fused import FusedOptimizer, Options, TorchOptions
from .schedule_free import ScheduleFree

__all__ = [
    "FusedADOPT",
    "FusedAdEMAMix",
    "FusedAdam",
    "FusedAdamW",
    "FusedAdan",
    "FusedCautiousAdamW",
    "FusedCautiousLion",
    "FusedLion",
    "FusedMARS",
    "FusedNAdamW",
    "FusedSGD",
    "FusedScheduleFreeAdamW",
]


class FusedADOPT(FusedOptimizer):
    """ADOPT (Taniguchi et al. 2024, arXiv 2411.02853, Algorithm 2, with the clipping of its second
    version): Adam that converges with any beta2, as each gradient is divided by the root of those
    before it.

    With gradient g, step count t and rate r = lr * multiplier (Eq. 2), from t = 2 on::

        c = clip(g / max(sqrt(v), eps), (t - 1)^0.25)
        m = beta1 * m + (1 - beta1) * c             exp_avg_normed
        v = beta2 * v + (1 - beta2) * g^2           exp_avg_sq
        p = p * (1 - r * weight_decay) - r * m

    The first step only sets v = g^2: the parameter does not change, nor does it decay.

    Args:
        others: as FusedAdamW, whose average is of gradients in their own unit, so that neither's
            state loads into the other.

    Raises ValueError or TypeError as FusedAdamW.

    >>> parameter = torch.nn.Parameter(torch.ones(1))
    >>> optimizer = hdet.FusedADOPT([parameter], lr=0.5)
    >>> for _ in range(2):
    ...     parameter.grad = torch.ones(1)
    ...     optimizer.step()
    ...     print(round(parameter.item(), 4))
    1.0
    0.95
    """

    rule = "adopt"

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 0.001,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.9999),
        eps: float | Tensor = 1e-06,
        weight_decay: float | Tensor = 0.0,
        *,
        decay_at: str = "replica",
        **options: Unpack[Options],
    ) -> None:
        settings = [lr, betas, eps, weight_decay]
        super().__init__(params, settings, decay_at=decay_at, **options)


class FusedAdEMAMix(FusedOptimizer):
    """AdEMAMix (Pagliardini et al. 2024, arXiv 2409.03137, Algorithm 1): AdamW with a second
    average of gradients, over tens of thousands of steps.

    With gradient g, step count t and rate r = lr * multiplier (Eq. 2)::

        m = beta1 * m + (1 - beta1) * g             exp_avg
        s = beta3(t) * s + (1 - beta3(t)) * g       exp_avg_slow
        v = beta2 * v + (1 - beta2) * g^2           exp_avg_sq
        u = (m / (1 - beta1^t) + alpha(t) * s) / (sqrt(v / (1 - beta2^t)) + eps)
        p = p * (1 - r * weight_decay) - r * u

    Args:
        betas: beta1, beta2 and beta3.
        alpha: the slow average's share of the direction.
        t_alpha: steps in which alpha(t) grows from 0, linearly; 0: none. The paper has the run's.
        t_beta3: steps in which beta3(t) grows from beta1, so that half-lives grow linearly,
            1 / ln beta3(t) = (1 - t / t_beta3) / ln beta1 + t / t_beta3 / ln beta3; 0: none. The
            paper has the run's.
        decay_at: as FusedAdamW.
        others: as FusedOptimizer. The slow average is float32 whatever `moment_dtype` is: a step
            changes it by less than half of what bfloat16 and codes can tell apart.

    Raises ValueError or TypeError as FusedAdamW. A state of FusedAdamW lacks exp_avg_slow, and is
    refused.

    A run of 1 000 steps, warmed up over all of them:

    >>> model = torch.nn.Linear(8, 1)
    >>> optimizer = hdet.FusedAdEMAMix(model.parameters(), lr=1e-3, t_alpha=1000, t_beta3=1000)
    >>> model(torch.ones(4, 8)).sum().backward()
    >>> optimizer.step()
    >>> sorted(optimizer.state[model.bias])
    ['exp_avg', 'exp_avg_slow', 'exp_avg_sq', 'step']
    """

    rule = "ademamix"

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 0.001,
        betas: tuple[float | Tensor, float | Tensor, float | Tensor] = (0.9, 0.999, 0.9999),
        alpha: float | Tensor = 5.0,
        t_alpha: float | Tensor = 0.0,
        t_beta3: float | Tensor = 0.0,
        eps: float | Tensor = 1e-08,
        weight_decay: float | Tensor = 0.01,
        *,
        decay_at: str = "replica",
        **options: Unpack[Options],
    ) -> None:
        settings = [lr, betas, alpha, t_alpha, t_beta3, eps, weight_decay]
        super().__init__(params, settings, decay_at=decay_at, **options)


class FusedAdam(FusedOptimizer):
    """Adam (Kingma and Ba 2015) as torch.optim.Adam computes it: same arguments, results and state.

    As FusedAdamW, but decay is part of the gradient, g + weight_decay * p, and so of the moments.
    Replicas that share moments (`set_replicas`) therefore need weight_decay 0.
    decoupled_weight_decay=True is refused: that is FusedAdamW.

    Raises ValueError or TypeError as FusedAdamW.

    With a gradient scaler, whose scale is too large for the first step:

    >>> model = torch.nn.Linear(8, 1)
    >>> optimizer = hdet.FusedAdam(model.parameters(), lr=1e-3)
    >>> scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
    >>> for _ in range(2):
    ...     optimizer.zero_grad()
    ...     scaler.scale(model(torch.ones(4, 8)).square().mean() + 8 * model.bias.sum()).backward()
    ...     _ = scaler.step(optimizer)
    ...     print(optimizer.step_skipped.item())
    ...     scaler.update(1.0)
    1.0
    0.0
    >>> optimizer.state[model.bias]["step"].item()
    1.0
    """

    rule = "adam"

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 0.001,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float | Tensor = 1e-08,
        weight_decay: float | Tensor = 0.0,
        amsgrad: bool = False,
        **options: Unpack[TorchOptions],
    ) -> None:
        settings = [lr, betas, eps, weight_decay, amsgrad]
        super().__init__(params, settings, **options)


class FusedAdamW(FusedOptimizer):
    """AdamW (Loshchilov and Hutter 2019, Algorithm 2) as torch.optim.AdamW computes it: same
    arguments, results and state.

    With gradient g, step count t and rate r = lr * multiplier (Eq. 2)::

        m = beta1 * m + (1 - beta1) * g             exp_avg
        v = beta2 * v + (1 - beta2) * g^2           exp_avg_sq
        u = (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps)
        p = p * (1 - r * weight_decay) - r * u

    Args:
        decay_at: "replica": decay acts at r, the rate the replica steps with, as stock AdamW at
            that rate would. "base": at lr, so that all replicas decay alike and differ along u
            only.
        others: as torch.optim.AdamW and FusedOptimizer.

    Raises ValueError or TypeError, before anything is changed, for arguments out of range or NaN,
    amsgrad, differentiable, and in a step for tensors that cannot be used (sparse, with gaps, of
    another dtype, overlapping), by name.

    A bfloat16 model with exact float32 weights behind it, clipped gradients, and a schedule:

    >>> model = torch.nn.Linear(8, 1).bfloat16()
    >>> optimizer = hdet.FusedAdamW(
    ...     model.parameters(), lr=3e-4, master_weights="split", max_grad_norm=1.0
    ... )
    >>> scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=100)
    >>> for _ in range(3):
    ...     optimizer.zero_grad()
    ...     model(torch.ones(4, 8, dtype=torch.bfloat16)).square().mean().backward()
    ...     optimizer.step()
    ...     scheduler.step()
    >>> sorted(optimizer.state[model.weight])
    ['exp_avg', 'exp_avg_sq', 'remainder', 'step']
    >>> optimizer.grad_norm.item() > 0, optimizer.step_skipped.item()
    (True, 0.0)
    """

    rule = "adamw"

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 0.001,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float | Tensor = 1e-08,
        weight_decay: float | Tensor = 0.01,
        amsgrad: bool = False,
        *,
        decay_at: str = "replica",
        **options: Unpack[TorchOptions],
    ) -> None:
        settings = [lr, betas, eps, weight_decay, amsgrad]
        super().__init__(params, settings, decay_at=decay_at, **options)


class FusedAdan(FusedOptimizer):
    """Adan (Xie et al. 2022, arXiv 2208.06677, Algorithm 1), with decoupled decay as in AdamW: the
    authors' code with no_prox=True.

    With gradient g, step count t and rate r = lr * multiplier (Eq. 2)::

        e = g - (gradient of the step before); 0 in the first
        m = beta1 * m + (1 - beta1) * g                     exp_avg
        d = beta2 * d + (1 - beta2) * e                     exp_avg_diff
        n = beta3 * n + (1 - beta3) * (g + beta2 * e)^2     exp_avg_sq
        u = (m / (1 - beta1^t) + beta2 * d / (1 - beta2^t)) / (sqrt(n / (1 - beta3^t)) + eps)
        p = p * (1 - r * weight_decay) - r * u

    Args:
        betas: as in the authors' code; the paper writes 1 - beta.
        others: as FusedAdamW. Four moments; neg_pre_grad is the gradient before, negated, as the
            authors keep it.

    Raises ValueError or TypeError as FusedAdamW.

    >>> model = torch.nn.Linear(8, 1)
    >>> optimizer = hdet.FusedAdan(model.parameters(), lr=1e-3)
    >>> model(torch.ones(4, 8)).sum().backward()
    >>> optimizer.step()
    >>> optimizer.state[model.bias]["neg_pre_grad"].item()
    -4.0
    """

    rule = "adan"

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 0.001,
        betas: tuple[float | Tensor, float | Tensor, float | Tensor] = (0.98, 0.92, 0.99),
        eps: float | Tensor = 1e-08,
        weight_decay: float | Tensor = 0.0,
        *,
        decay_at: str = "replica",
        **options: Unpack[Options],
    ) -> None:
        settings = [lr, betas, eps, weight_decay]
        super().__init__(params, settings, decay_at=decay_at, **options)


class FusedCautiousAdamW(FusedOptimizer):
    """Cautious AdamW (Liang et al. 2024, arXiv 2411.16085, Algorithm 1): FusedAdamW without those
    elements of the direction that go up the gradient; the others are as much larger.

    With gradient g, step count t and rate r = lr * multiplier (Eq. 2)::

        m = beta1 * m + (1 - beta1) * g             exp_avg
        v = beta2 * v + (1 - beta2) * g^2           exp_avg_sq
        mask = 1 where m * g > 0, else 0
        u = (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps) * mask / max(mean(mask), 0.001)
        p = p * (1 - r * weight_decay) - r * u

    The mean is of a whole parameter, and takes a pass over gradient and exp_avg before the step.
    Arguments, state and errors are those of FusedAdamW, and a state of either loads into the other.
    Refused: sharded DTensors, whose means are on several ranks.

    A run that FusedAdamW began:

    >>> model = torch.nn.Linear(8, 1)
    >>> before = hdet.FusedAdamW(model.parameters(), lr=1e-3)
    >>> model(torch.ones(4, 8)).sum().backward()
    >>> before.step()
    >>> optimizer = hdet.FusedCautiousAdamW(model.parameters(), lr=1e-3)
    >>> optimizer.load_state_dict(before.state_dict())
    >>> optimizer.step()
    >>> optimizer.state[model.weight]["step"].item()
    2.0
    """

    rule = "cautious_adamw"

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 0.001,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float | Tensor = 1e-08,
        weight_decay: float | Tensor = 0.01,
        amsgrad: bool = False,
        *,
        decay_at: str = "replica",
        **options: Unpack[TorchOptions],
    ) -> None:
        settings = [lr, betas, eps, weight_decay, amsgrad]
        super().__init__(params, settings, decay_at=decay_at, **options)


class FusedCautiousLion(FusedOptimizer):
    """Cautious Lion (Liang et al. 2024, arXiv 2411.16085): FusedLion without those elements of the
    direction that go up the gradient; the others are as much larger.

    With gradient g and rate r = lr * multiplier (Eq. 2)::

        u = sign(beta1 * m + (1 - beta1) * g)
        m = beta2 * m + (1 - beta2) * g             exp_avg
        mask = 1 where u * g > 0, else 0
        p = p * (1 - r * weight_decay) - r * u * mask / max(mean(mask), 0.001)

    Arguments, state and errors are those of FusedLion, and a state of either loads into the other.
    The mean is FusedCautiousAdamW's, and sharded DTensors are refused as there.

    >>> parameter = torch.nn.Parameter(torch.ones(2))
    >>> optimizer = hdet.FusedCautiousLion([parameter], lr=0.25)
    >>> parameter.grad = torch.tensor([1.0, 0.0])
    >>> optimizer.step()
    >>> parameter.tolist()
    [0.5, 1.0]
    """

    rule = "cautious_lion"

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 0.0001,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.99),
        weight_decay: float | Tensor = 0.0,
        *,
        decay_at: str = "replica",
        **options: Unpack[Options],
    ) -> None:
        settings = [lr, betas, weight_decay]
        super().__init__(params, settings, decay_at=decay_at, **options)


class FusedLion(FusedOptimizer):
    """Lion (Chen et al. 2023, Algorithm 2). One moment, and every element moves by the rate or not
    at all.

    With gradient g and rate r = lr * multiplier (Eq. 2)::

        u = sign(beta1 * m + (1 - beta1) * g)       sign(0) = sign(NaN) = 0
        m = beta2 * m + (1 - beta2) * g             exp_avg
        p = p * (1 - r * weight_decay) - r * u

    Args:
        lr: of the size of a step; a third to a tenth of AdamW's is usual, with a weight_decay
            larger by as much.
        betas: (of the direction, of the average).
        decay_at: as FusedAdamW.
        others: as FusedOptimizer.

    Raises ValueError or TypeError as FusedAdamW.

    Two replicas of one parameter, at half and at one and a half times the rate:

    >>> parameter = torch.nn.Parameter(torch.ones(1))
    >>> optimizer = hdet.FusedLion([parameter], lr=0.25)
    >>> optimizer.set_replicas(2, lambda p: [p, p.detach().clone()])
    >>> optimizer.multipliers = [[0.5], [1.5]]
    >>> parameter.grad = torch.ones(1)
    >>> optimizer.step()
    >>> [optimizer.replica_parameters(k)[0].item() for k in range(2)]
    [0.875, 0.625]
    >>> optimizer.average_replicas([0.5, 0.5])
    >>> [optimizer.replica_parameters(k)[0].item() for k in range(2)]
    [0.75, 0.75]
    """

    rule = "lion"

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 0.0001,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.99),
        weight_decay: float | Tensor = 0.0,
        *,
        decay_at: str = "replica",
        **options: Unpack[Options],
    ) -> None:
        settings = [lr, betas, weight_decay]
        super().__init__(params, settings, decay_at=decay_at, **options)


class FusedMARS(FusedOptimizer):
    """MARS-AdamW (Yuan et al. 2024, arXiv 2411.10438, Algorithm 2), with the gradient of the step
    before in the place of one of this batch at the weights before (the paper's MARS-approx).

    With gradient g, step count t and rate r = lr * multiplier (Eq. 2)::

        c = g + gamma * beta1 / (1 - beta1) * (g - last_grad)
        c = c / max(1, norm(c))
        m = beta1 * m + (1 - beta1) * c             exp_avg
        v = beta2 * v + (1 - beta2) * c^2           exp_avg_sq
        u = (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps)
        p = p * (1 - r * weight_decay) - r * u

    The norm is of a whole parameter, and takes a pass over gradient and last_grad before the step.

    Args:
        gamma: how much of the difference of gradients counts.
        others: as FusedAdamW. The authors step vectors (biases, norms) with AdamW, at a rate of
            their own.

    Raises ValueError or TypeError as FusedAdamW. Refused: sharded DTensors, whose norms are on
    several ranks.

    >>> model = torch.nn.Linear(8, 1)
    >>> optimizer = hdet.FusedMARS(model.parameters(), lr=3e-3, weight_decay=0.1)
    >>> model(torch.ones(4, 8)).sum().backward()
    >>> optimizer.step()
    >>> sorted(optimizer.state[model.bias])
    ['exp_avg', 'exp_avg_sq', 'last_grad', 'step']
    """

    rule = "mars"

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 0.003,
        betas: tuple[float | Tensor, float | Tensor] = (0.95, 0.99),
        eps: float | Tensor = 1e-08,
        weight_decay: float | Tensor = 0.0,
        gamma: float | Tensor = 0.025,
        *,
        decay_at: str = "replica",
        **options: Unpack[Options],
    ) -> None:
        settings = [lr, betas, eps, weight_decay, gamma]
        super().__init__(params, settings, decay_at=decay_at, **options)


class FusedNAdamW(FusedOptimizer):
    """NAdamW as AlgoPerf's baselines have it (Choi et al. 2019, arXiv 1910.05446, Table 1):
    AdamW whose direction is averaged with the gradient once more.

    With gradient g, step count t and rate r = lr * multiplier (Eq. 2)::

        m = beta1 * m + (1 - beta1) * g             exp_avg
        v = beta2 * v + (1 - beta2) * g^2           exp_avg_sq
        u = (beta1 * m + (1 - beta1) * g) / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps)
        p = p * (1 - r * weight_decay) - r * u

    It is not torch.optim.NAdam, whose beta1 changes from step to step. Arguments, state and errors
    are those of FusedAdamW, and a state of either loads into the other.

    A run that FusedAdamW began:

    >>> model = torch.nn.Linear(8, 1)
    >>> before = hdet.FusedAdamW(model.parameters(), lr=1e-3)
    >>> model(torch.ones(4, 8)).sum().backward()
    >>> before.step()
    >>> optimizer = hdet.FusedNAdamW(model.parameters(), lr=1e-3)
    >>> optimizer.load_state_dict(before.state_dict())
    >>> optimizer.step()
    >>> optimizer.state[model.weight]["step"].item()
    2.0
    """

    rule = "nadamw"

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 0.001,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float | Tensor = 1e-08,
        weight_decay: float | Tensor = 0.01,
        amsgrad: bool = False,
        *,
        decay_at: str = "replica",
        **options: Unpack[TorchOptions],
    ) -> None:
        settings = [lr, betas, eps, weight_decay, amsgrad]
        super().__init__(params, settings, decay_at=decay_at, **options)


class FusedSGD(FusedOptimizer):
    """SGD with momentum, dampening and Nesterov momentum as torch.optim.SGD computes it: same
    arguments and results.

    With gradient g and rate r = lr * multiplier (Eq. 2)::

        g = g + weight_decay * p
        b = momentum * b + (1 - dampening) * g      momentum_buffer; in its first step b = g
        p = p - r * (g + momentum * b if nesterov else b)

    The state has a `step` beside torch's `momentum_buffer`, which a group without momentum does not
    have. torch's states, which have no step, load: a buffer that is there counts as one step.
    Replicas that share the buffer (`set_replicas`) need weight_decay 0.

    Raises ValueError or TypeError as FusedAdamW; nesterov needs momentum > 0 and dampening 0.

    A run that torch.optim.SGD began:

    >>> model = torch.nn.Linear(8, 1)
    >>> before = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    >>> optimizer = hdet.FusedSGD(model.parameters(), lr=0.1, momentum=0.9)
    >>> model(torch.ones(4, 8)).sum().backward()
    >>> before.step()
    >>> optimizer.load_state_dict(before.state_dict())
    >>> optimizer.step()
    >>> round(optimizer.state[model.bias]["momentum_buffer"].item(), 4)  # 0.9 * 4 + 4
    7.6
    """

    rule = "sgd"

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 0.001,
        momentum: float | Tensor = 0.0,
        dampening: float | Tensor = 0.0,
        weight_decay: float | Tensor = 0.0,
        nesterov: bool = False,
        **options: Unpack[TorchOptions],
    ) -> None:
        settings = [lr, momentum, dampening, weight_decay, nesterov]
        super().__init__(params, settings, **options)


class FusedScheduleFreeAdamW(ScheduleFree):
    """Schedule-free AdamW (Defazio et al. 2024, arXiv 2405.15682) as schedulefree's
    AdamWScheduleFree computes it: a constant rate, and an average of the weights in place of decay
    to 0.

    The parameters are y, where gradients are taken; `eval()` makes them x, the average, and
    `train()` makes them y again. With gradient g, step count t and rate r = lr * multiplier *
    min(1, t / warmup_steps)::

        v = beta2 * v + (1 - beta2) * g^2           exp_avg_sq
        d = g / (sqrt(v / (1 - beta2^t)) + eps) + weight_decay * y
        c = w / (sum of all w until now),  w = t^r * (largest rate until now)^weight_lr_power
        y = (1 - c) * y + c * z + r * (beta1 * (1 - c) - 1) * d
        z = z - r * d

    Args:
        betas: beta1, of y = beta1 * x + (1 - beta1) * z, above 0; beta2.
        warmup_steps: in which the rate grows from 0.
        r, weight_lr_power: of the weights w.
        others: as FusedOptimizer. z is float32 whatever `moment_dtype` is; it begins as the
            parameter, or its master. A bfloat16 model needs `master_weights`, or each change of
            mode rounds it.

    An optimizer begins in train mode. t of the weights, their sum and the largest rate are numbers
    of a group, as schedulefree has them; each `step` counts for its own parameter. After a rate was
    lowered, later steps count as much in x as earlier ones.

    In an Ensemble z is averaged with the parameters. Multipliers move r, and not w, so that all
    replicas average alike and the mean of their x is that of the mean z. K replicas share
    exp_avg_sq, have a z each (`replica_z` in a state, K - 1 tensors), and are stepped one after
    the other: K times the traffic of one, and one more exp_avg_sq in memory.

    Raises ValueError or TypeError as FusedAdamW; RuntimeError for a step in eval mode, and where a
    CUDA graph is captured: c is computed on the host in each step. Refused: a rate in a tensor on a
    GPU, decay_at and cautious_decay.

    >>> model = torch.nn.Linear(8, 1)
    >>> optimizer = hdet.FusedScheduleFreeAdamW(model.parameters(), lr=0.0025, warmup_steps=10)
    >>> for _ in range(3):
    ...     optimizer.zero_grad()
    ...     model(torch.ones(4, 8)).square().mean().backward()
    ...     optimizer.step()
    >>> optimizer.eval()  # before a measurement, and before the model is saved
    >>> optimizer.step()
    Traceback (most recent call last):
    RuntimeError: this optimizer is in eval mode: call its train() before a step
    """

    rule = "schedule_free_adamw"

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 0.0025,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float | Tensor = 1e-08,
        weight_decay: float | Tensor = 0.0,
        warmup_steps: int = 0,
        r: float | Tensor = 0.0,
        weight_lr_power: float | Tensor = 2.0,
        **options: Unpack[Options],
    ) -> None:
        settings = [lr, betas, eps, weight_decay, warmup_steps, r, weight_lr_power]
        super().__init__(params, settings, **options)
