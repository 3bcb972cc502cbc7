"""AutoLR in a loop with accelerate.

    python examples/accelerate_loop.py
    torchrun --nproc-per-node 2 examples/accelerate_loop.py

A small regression with accumulation, clipping and a prepared scheduler, from a thirtieth of a good
rate.
"""

import sys
import tempfile

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hdet

PARTS = 2


def losses_of(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    return (model(batch[0]) - batch[1]).square().mean(1)


def main(steps: int = 250) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=PARTS)
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    # accelerate steps a prepared scheduler once for each process.
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(
        optimizer, T_max=steps * accelerator.num_processes
    )
    x = torch.randn(16 * PARTS * steps * accelerator.num_processes, 8)
    loader = DataLoader(TensorDataset(x, x.sin().sum(1, keepdim=True)), batch_size=16)
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)

    def clip() -> None:
        accelerator.clip_grad_norm_(model.parameters(), 1.0)

    # Below 1 000 steps there is no trial: how far the first 28 steps move the weights decides.
    search = hdet.AutoLR(model, before_step=clip)
    ensemble = hdet.Ensemble(optimizer.optimizer, scheduler, total_steps=steps, search=search)
    ensemble = hdet.integrations.accelerate.prepare(accelerator, ensemble, model, losses_of)
    for batch in loader:
        with accelerator.accumulate(model):
            loss = losses_of(model, batch).mean()
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                clip()
            optimizer.step()
            ensemble.step(loss, batch)  # in the place of scheduler.step()
            optimizer.zero_grad()
    accelerator.save_state(tempfile.mkdtemp())  # averages the replicas, and saves the Ensemble too
    accelerator.print(
        f"{ensemble.report()}\ncorrection of the rate: {ensemble.corrections['lr']:.3g}; last loss "
        f"{loss.item():.3f}"
    )


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
