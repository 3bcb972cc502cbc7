"""What shared gradients imply: inside a cycle all replicas lie on one line, and their mean is the base-rate trajectory.

theta_r = D theta_0 - rho_r s,   s <- (1 - eta wd) s + eta u,   D = prod(1 - eta wd)     (decay at the base rate)
"""

import pytest
import torch
from torch.optim.lr_scheduler import OneCycleLR

import hdet
from tests.distributed import run_ranks
from tests.reference import method

STEPS, REPLICAS, SPREAD, SIZE = 40, 4, 0.3, 500


def _start(dtype):
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(11)).to(dtype)


def _gradient(step, dtype):
    return (torch.randn(SIZE, generator=torch.Generator().manual_seed(step)) + 0.3).to(dtype)


def _schedule(optimizer):
    return OneCycleLR(optimizer, 1e-2, STEPS, cycle_momentum=False)


def _replica(rank, world, dtype, weight_decay, spread=SPREAD):
    """One cycle as long as the run, driven by one fixed sequence of gradients: the parameters before and after the converge."""
    theta = _start(dtype).requires_grad_()
    optimizer = torch.optim.AdamW([theta], lr=1.0, weight_decay=weight_decay)
    ensemble = hdet.Ensemble(optimizer, _schedule(optimizer), knobs=[hdet.LearningRate(spread)], sync=hdet.Sync(STEPS))
    rho = ensemble.multipliers["lr"]
    for step in range(STEPS):
        theta.grad = _gradient(step, dtype)
        optimizer.step()
        before = theta.detach().clone()
        state = {key: value.clone() for key, value in optimizer.state[theta].items()}
        ensemble.step()
    return rho, before, theta.detach().clone(), state


def _base(dtype, weight_decay):
    """Plain AdamW at the base rate with the same gradients."""
    theta = _start(dtype).requires_grad_()
    optimizer = torch.optim.AdamW([theta], lr=1.0, weight_decay=weight_decay)
    scheduler = _schedule(optimizer)
    for step in range(STEPS):
        theta.grad = _gradient(step, dtype)
        optimizer.step()
        scheduler.step()
    return theta.detach()


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-13), (torch.float32, 5e-6)])
def test_replicas_lie_on_one_line_and_their_mean_is_the_base_rate_run(dtype, tolerance):
    ranks = run_ranks(_replica, REPLICAS, dtype, 0.0)
    rho = torch.tensor([rank[0] for rank in ranks], dtype=torch.float64)
    assert sorted(rho.tolist()) == pytest.approx(method.multipliers(REPLICAS, SPREAD))
    theta = torch.stack([rank[1] for rank in ranks]).double()
    start, mean = _start(dtype).double(), theta.mean(0)
    displacement = start - mean  # s
    size = displacement.norm()
    assert size > 1
    for r in range(REPLICAS):  # theta_r = theta_mean + (1 - rho_r) s
        assert (theta[r] - mean - (1 - rho[r]) * displacement).norm() / size < tolerance
    assert torch.linalg.svdvals(theta - mean)[1] / size < tolerance  # one direction, nothing beside it
    base = _base(dtype, 0.0).double()
    assert (mean - base).norm() / size < tolerance
    for _, _, after, state in ranks:
        assert (after.double() - base).norm() / size < tolerance
        for key, value in state.items():
            assert torch.equal(value, ranks[0][3][key])  # shared gradients: the moments are the same everywhere, bit for bit


def test_decay_at_the_replicas_own_rate_adds_a_second_order_term():
    """torch's AdamW decays by 1 - lr rho wd: in the mean the terms linear in the spread cancel, those quadratic in it remain."""
    weight_decay, base = 2.0, _base(torch.float64, 2.0)
    off = []
    for spread in (SPREAD, SPREAD / 2):
        ranks = run_ranks(_replica, REPLICAS, torch.float64, weight_decay, spread)
        mean = torch.stack([rank[1] for rank in ranks]).mean(0)
        off.append(((mean - base).norm() / (base - _start(torch.float64)).norm()).item())
    assert 1e-4 < off[0] < 2e-2
    assert off[0] / off[1] == pytest.approx(4, rel=0.05)
