"""A loop in the way of torchtitan: a loader without pinned memory, gradients clipped, metrics every 10 steps."""

import torch

device = "cuda"
tokens = torch.randint(0, 64, (10_000,))
rows = [{"input": tokens[i : i + 16], "label": tokens[i + 1 : i + 17]} for i in range(0, 8_000, 16)]
model = torch.nn.Sequential(torch.nn.Embedding(64, 32), torch.nn.Linear(32, 64)).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 5))
batches = iter(torch.utils.data.DataLoader(rows, batch_size=8))
for step in range(1, 23):
    optimizer.zero_grad()
    batch = {name: values.to(device) for name, values in next(batches).items()}
    with torch.autocast("cuda", dtype=torch.bfloat16):
        prediction = model(batch["input"])
        loss = torch.nn.functional.cross_entropy(prediction.flatten(0, 1).float(), batch["label"].flatten())
    del prediction
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
    optimizer.step()
    scheduler.step()
    if step % 10 == 0:
        print(f"step {step}: loss {loss.detach().item():.4f}, grad_norm {norm.item():.4f}")
