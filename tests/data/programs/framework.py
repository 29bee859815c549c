"""Small runs of frameworks; the first argument says which."""

import sys
import tempfile

import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

which, *habits = sys.argv[1:]
torch.manual_seed(0)
DATA = TensorDataset(torch.randn(128, 8), torch.randint(0, 3, (128,)))


class Tokens(Dataset):
    """Sequences that count."""

    def __len__(self):
        return 64

    def __getitem__(self, index):
        ids = [(index + place) % 32 for place in range(8)]
        return {"input_ids": ids, "labels": ids, "attention_mask": [1] * 8}


if which == "trainer":
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    log = "log" in habits
    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=4,
        max_steps=8,
        logging_steps=1 if log else 500,
        logging_nan_inf_filter=not log,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
    )
    model = LlamaForCausalLM(LlamaConfig(vocab_size=32, num_key_value_heads=2, **sizes))
    Trainer(model=model, args=arguments, train_dataset=Tokens()).train()

if which == "accelerate":
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration

    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(non_blocking=True))
    model = torch.nn.Linear(8, 3)
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.AdamW(model.parameters()), DataLoader(DATA, batch_size=16, pin_memory=True)
    )
    for x, y in loader:
        loss = torch.nn.functional.cross_entropy(model(x), y)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss.item()

if which == "lightning":
    import lightning

    class Module(lightning.LightningModule):
        """A linear layer."""

        def __init__(self):
            super().__init__()
            self.net = torch.nn.Linear(8, 3)

        def training_step(self, batch, index):
            loss = torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])
            if "bar" in habits:
                self.log("loss", loss, prog_bar=True, on_step=True)
            return loss

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters())

    trainer = lightning.Trainer(
        max_steps=8,
        logger=False,
        enable_progress_bar=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(), DataLoader(DATA, batch_size=16))
