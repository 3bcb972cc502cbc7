"""AutoLR as a callback of Lightning's Trainer.

    python examples/lightning_module.py
    python examples/lightning_module.py 250 2    (two processes)

A small regression with accumulation, clipping, validations and a schedule, from a thirtieth of a
good rate.
"""

import sys

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hdet


class Sines(pl.LightningModule):
    def __init__(self, lr: float) -> None:
        super().__init__()
        self.net, self.lr = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1)), lr

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        self.log("validation", nn.functional.mse_loss(self.net(batch[0]), batch[1]))

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(
            optimizer, T_max=self.trainer.max_steps
        )
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def batches(count: int) -> DataLoader:
    x = torch.randn(16 * count, 8)
    return DataLoader(TensorDataset(x, x.sin().sum(1, keepdim=True)), batch_size=16)


def main(steps: int = 250, processes: int = 1) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    # Below 1 000 steps there is no trial: how far the first 28 steps move the weights decides.
    callback = hdet.integrations.lightning.HdetCallback(search=hdet.AutoLR)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=processes,
        max_steps=steps,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        val_check_interval=steps // 2,
        callbacks=[callback],
        **dict.fromkeys(["enable_checkpointing", "enable_progress_bar", "logger"], False),
    )
    trainer.fit(Sines(1e-4), batches(2 * steps * processes), batches(8))
    loss = trainer.callback_metrics["validation"]
    print(
        f"correction of the rate: {callback.ensemble.corrections['lr']:.3g}; held-out loss "
        f"{loss:.3f}"
    )


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
