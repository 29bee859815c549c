"""A loop in the way of nanoGPT: batches of a numpy file, pinned and moved asynchronously."""

import numpy as np
import torch

device = "cuda"
tokens = np.random.randint(0, 64, 10_000)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    starts = torch.randint(len(tokens) - 16, (8,))
    x = torch.stack([torch.from_numpy(tokens[i : i + 16].astype(np.int64)) for i in starts])
    y = torch.stack([torch.from_numpy(tokens[i + 1 : i + 17].astype(np.int64)) for i in starts])
    return x.pin_memory().to(device, non_blocking=True), y.pin_memory().to(device, non_blocking=True)


model = torch.nn.Sequential(torch.nn.Embedding(64, 32), torch.nn.Linear(32, 64)).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
scaler = torch.amp.GradScaler("cuda", enabled=True)
x, y = batch()
for step in range(20):
    with torch.autocast("cuda", dtype=torch.float16):
        loss = torch.nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
    x, y = batch()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    if step % 10 == 0:
        print(f"step {step}: loss {loss.item():.4f}")
