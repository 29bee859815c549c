"""A small Lightning run. What do its callbacks and loggers cost?

steptime overhead --lightning -- lightning_run.py"""

import tempfile

import lightning
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import CSVLogger


class GradNorms(Callback):
    """Reads the norm of each gradient: the host waits for each."""

    def on_before_optimizer_step(self, trainer, module, optimizer):
        self.norms = [one.grad.norm().item() for one in module.parameters()]


class Batches(Callback):
    """Counts batches."""

    def on_train_batch_end(self, trainer, module, outputs, batch, number):
        self.number = number


class Net(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4))

    def training_step(self, batch, number):
        loss = torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main():
    torch.manual_seed(0)
    data = torch.utils.data.TensorDataset(torch.randn(256, 32), torch.randint(0, 4, (256,)))
    trainer = lightning.Trainer(
        accelerator="auto" if torch.cuda.is_available() else "cpu",
        max_steps=12,
        log_every_n_steps=10,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        logger=CSVLogger(tempfile.mkdtemp()),
        callbacks=[GradNorms(), Batches()],
    )
    trainer.fit(Net(), torch.utils.data.DataLoader(data, batch_size=16))


if __name__ == "__main__":
    main()
