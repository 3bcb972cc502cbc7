"""A scheduler of timm's, which is none of torch's, in a loop as timm's train.py has it.

    python examples/timm_scheduler.py    (after pip install timm)

A small regression, from a thirtieth of a good rate.
"""

import sys

import torch
from torch import nn

import hdet


def main(cosine: type, epochs: int = 5, updates: int = 50) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    total = epochs * updates
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    scheduler = cosine(
        optimizer, t_initial=total, warmup_t=10, warmup_lr_init=1e-5, t_in_epochs=False
    )
    # Below 1 000 steps there is no trial: how far the first 28 steps move the weights decides.
    search = hdet.AutoLR(model)
    ensemble = hdet.Ensemble(optimizer, total_steps=total, search=search)  # without the scheduler
    num_updates = 0
    for epoch in range(epochs):
        for _ in range(updates):
            x = torch.randn(32, 8)

            def losses(x: torch.Tensor = x) -> torch.Tensor:
                return (model(x) - x.sin().sum(1, keepdim=True)).square().mean(1)

            loss = losses().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            num_updates += 1
            with ensemble.rescheduling():
                scheduler.step_update(num_updates=num_updates)
            ensemble.step(loss, closure=losses)
        with ensemble.rescheduling():
            scheduler.step(epoch + 1)
    print(
        f"{ensemble.report()}\ncorrection of the rate: {ensemble.corrections['lr']:.3g}; last loss "
        f"{loss.item():.3f}"
    )


if __name__ == "__main__":
    from timm.scheduler import CosineLRScheduler

    main(CosineLRScheduler, *map(int, sys.argv[1:]))
