"""accelerate with gradient accumulation over two micro-batches, and the loss gathered for the log."""

import numpy as np
import torch
from accelerate import Accelerator

accelerator = Accelerator(gradient_accumulation_steps=2)
rows = np.random.rand(256, 32).astype("float32")
data = torch.utils.data.TensorDataset(torch.from_numpy(rows), torch.from_numpy(np.random.randint(0, 4, 256)))
model = torch.nn.Linear(32, 4)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = torch.utils.data.DataLoader(data, batch_size=16)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for x, y in loader:
    with accelerator.accumulate(model):
        loss = torch.nn.functional.cross_entropy(model(x), y)
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
