"""A small training program with one habit at a time; the first argument says which."""

import sys

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

habit = sys.argv[1]
device = "cuda" if torch.cuda.is_available() else "cpu"
if habit == "cpu":
    device = "cpu"
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3)).to(device)
if habit in ("inductor", "aot_eager"):
    model = torch.compile(model, backend=habit)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
inputs, labels = torch.randn(128, 8), torch.randint(0, 3, (128,))
if habit == "numpy":
    inputs = torch.from_numpy(np.ones((128, 8), dtype="float32"))
if habit == "on_device":
    inputs, labels = inputs.to(device), labels.to(device)
pinned = habit in ("pinned", "running", "float16", "resumed", "generator")
loader = DataLoader(
    TensorDataset(inputs, labels),
    batch_size=16,
    shuffle=habit != "generator",
    pin_memory=pinned,
    num_workers=2 if habit == "workers" else 0,
)
running = torch.tensor(0.0, device=device)
scaler = torch.amp.GradScaler(device, enabled=habit == "float16")
drawn = torch.Generator(device=device)
if habit == "resumed":
    torch.save(optimizer.state_dict(), "state.pt")
    optimizer.load_state_dict(torch.load("state.pt", map_location=device))
for x, y in loader:
    if habit != "on_device":
        x, y = x.to(device, non_blocking=pinned), y.to(device, non_blocking=pinned)
    assert str(x.device) == {"cuda": "cuda:0"}.get(device, device)
    assert x.is_cuda == (device == "cuda")
    with torch.autocast(device, dtype=torch.float16, enabled=habit == "float16"):
        loss = nn.functional.cross_entropy(model(x), y)
    scaler.scale(loss).backward()
    if (
        habit in ("clipped", "inductor", "aot_eager")
        and nn.utils.clip_grad_norm_(model.parameters(), 1.0) > 100
    ):
        print("large")
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    if habit == "generator":
        torch.randn(4, device=device, generator=drawn)
    if habit == "running":
        running += loss.detach()
        running.item()
        torch.tensor([1.0, 2.0], device=device)
    if habit in ("inductor", "aot_eager"):
        loss.item()
    if habit == "accepted":
        loss.item()  # sync-ok: the schedule needs the loss
    if habit == "crash" and optimizer.state[model[0].weight]["step"] == 7:
        loss.item()
        raise RuntimeError("out of data")
    if habit == "graph":
        torch.cuda.CUDAGraph()
