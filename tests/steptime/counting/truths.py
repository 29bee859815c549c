"""Small programs of other people's kinds of training, and what each would wait for on a GPU, per step.

The right answers come from CUDA's and PyTorch's semantics. A program says `device` where it would on a GPU."""

from __future__ import annotations

from dataclasses import dataclass, field

HEAD = """
import threading, torch, torch.nn as nn, numpy as np
from torch.utils.data import DataLoader, Dataset, TensorDataset
device = "cuda" if torch.cuda.is_available() else "cpu"
model = nn.Linear(8, 4).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loss_of = nn.functional.cross_entropy
def step(loss):
    loss.backward(); optimizer.step(); optimizer.zero_grad()
"""
LOOP = """
for x, y in loader:
    x, y = x.to(device{how}), y.to(device{how})
    step(loss_of(model(x), y))
"""
ARRAYS = (
    'data = TensorDataset(torch.from_numpy(np.random.rand(64, 8).astype("float32")), torch.arange(64) % 4)\n'
)


@dataclass(frozen=True)
class Program:
    """Attributes: `right` kind -> number per step; `steps` that are counted."""

    text: str
    right: dict[str, float] = field(default_factory=dict)
    steps: int | None = None


ON_DEVICE = "x = torch.randn(4, 8, device=device); y = torch.zeros(4, dtype=torch.long, device=device)\n"
PROGRAMS = {
    "arrays moved in each step": Program(
        HEAD + ARRAYS + "loader = DataLoader(data, batch_size=8)" + LOOP.format(how=""),
        {"blocking copy to device": 2},
    ),
    "pinned loader, asynchronous copies": Program(
        HEAD
        + ARRAYS
        + "loader = DataLoader(data, batch_size=8, pin_memory=True)"
        + LOOP.format(how=", non_blocking=True")
    ),
    "asynchronous copies of pageable memory": Program(
        HEAD + ARRAYS + "loader = DataLoader(data, batch_size=8)" + LOOP.format(how=", non_blocking=True"),
        {"pageable copy": 2},
    ),
    "data of torch's factories on the host": Program(
        HEAD
        + "data = TensorDataset(torch.randn(64, 8), torch.randint(0, 4, (64,)))\n"
        + "loader = DataLoader(data, batch_size=8)"
        + LOOP.format(how=""),
        {"blocking copy to device": 2},
    ),
    "worker processes": Program(
        HEAD + ARRAYS + "loader = DataLoader(data, batch_size=8, num_workers=1)" + LOOP.format(how=""),
        {"blocking copy to device": 2},
    ),
    "shuffled data on the device": Program(
        HEAD
        + "data = TensorDataset(torch.randn(32, 8, device=device))\n"
        + "for epoch in range(4):\n    for (x,) in DataLoader(data, batch_size=16, shuffle=True):\n"
        + "        step(model(x).square().mean())\n"
    ),
    "a loss that is added up and read": Program(
        HEAD
        + ON_DEVICE
        + "total = torch.tensor(0.0, device=device)\nfor i in range(8):\n    loss = loss_of(model(x), y)\n"
        + "    step(loss); total += loss.detach(); total.item(); torch.tensor([1.0], device=device)\n",
        {"item()": 1, "blocking copy to device": 1},
    ),
    "gradient norm tested, loss printed": Program(
        HEAD
        + ON_DEVICE
        + "for i in range(8):\n    loss = loss_of(model(x), y); loss.backward()\n"
        + "    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0); optimizer.step(); optimizer.zero_grad()\n"
        + "    if norm > 100: print('big')\n    str(loss)\n",
        {"truth test": 1, "print": 1},
    ),
    "GradScaler": Program(
        HEAD
        + ON_DEVICE
        + "scaler = torch.amp.GradScaler('cuda')\nfor i in range(8):\n"
        + "    with torch.autocast('cuda', dtype=torch.bfloat16):\n        loss = loss_of(model(x), y)\n"
        + "    scaler.scale(loss).backward(); scaler.step(optimizer); scaler.update(); optimizer.zero_grad()\n",
        {"item()": 1},
    ),
    "a default device": Program(
        HEAD
        + "torch.set_default_device('cuda')\nx = torch.randn(4, 8)\nassert x.is_cuda and x.device.type == 'cuda'\n"
        + "for i in range(8):\n    step(model(x).square().mean()); torch.ones(3).sum().item()\n"
        + "torch.set_default_device(None)\n",
        {"item()": 1},
    ),
    "streams and events": Program(
        HEAD
        + ON_DEVICE
        + "stream, event = torch.cuda.Stream(), torch.cuda.Event()\nfor i in range(8):\n"
        + "    with torch.cuda.stream(stream):\n        step(loss_of(model(x), y))\n"
        + "    event.record(); event.synchronize(); torch.cuda.synchronize()\n",
        {"event synchronize": 1, "device synchronize": 1},
    ),
    "masks and shapes of values": Program(
        HEAD
        + ON_DEVICE
        + "for i in range(8):\n    step(loss_of(model(x), y)); x[x > 0]; torch.nonzero(y); y.cpu(); y.tolist()\n",
        {"read by mask": 1, "nonzero": 1, "blocking copy to host": 1, "tolist()": 1},
    ),
    "a thread of its own class": Program(
        HEAD
        + ON_DEVICE
        + "class Log(threading.Thread):\n    def run(self): loss.item()\n"
        + "for i in range(8):\n    loss = loss_of(model(x), y); step(loss)\n    t = Log(); t.start(); t.join()\n",
        {"item()": 1},
    ),
    "tensors made of tensors, and of nothing": Program(
        HEAD
        + ON_DEVICE
        + "for i in range(8):\n    loss = loss_of(model(x), y); step(loss)\n    assert torch.as_tensor(loss).is_cuda\n"
        + "    torch.tensor([], device=device)\n",
    ),
    "two optimizers": Program(
        HEAD
        + ON_DEVICE
        + "second = torch.optim.SGD(model.parameters(), lr=0.0)\nfor i in range(8):\n"
        + "    loss = loss_of(model(x), y); step(loss); second.step(); loss.item()\n",
        {"item()": 1},
        steps=6,
    ),
    "a resumed run": Program(
        HEAD
        + ON_DEVICE
        + "import io\nstep(loss_of(model(x), y)); file = io.BytesIO(); torch.save(optimizer.state_dict(), file)\n"
        + "file.seek(0); state = torch.load(file)\nassert state['state'][0]['exp_avg'].is_cuda\n"
        + "optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3); optimizer.load_state_dict(state)\n"
        + "for i in range(8):\n    step(loss_of(model(x), y))\n",
    ),
    "meta": Program(
        HEAD
        + "with torch.device('meta'):\n    model = nn.Linear(8, 4)\n"
        + "assert model.weight.is_meta and torch.ones(2).to('meta').is_meta\n"
        + "model.to_empty(device=device); assert model.weight.is_cuda\n"
        + "optimizer = torch.optim.SGD(model.parameters(), lr=0.0)\nx = torch.ones(4, 8, device=device)\n"
        + "for i in range(8):\n    step(model(x).sum())\n",
    ),
    "a compiled function that reads": Program(
        HEAD
        + ON_DEVICE
        + "@torch.compile(backend='aot_eager')\ndef loss_and_read(x):\n    loss = model(x).square().mean()\n"
        + "    torch._dynamo.graph_break()\n    return loss * 2\n"
        + "for i in range(8):\n    loss = loss_and_read(x); step(loss); loss.item()\n",
        {"item()": 1},
    ),
    "only the CPU": Program(
        "import torch\nm = torch.nn.Linear(4, 4); o = torch.optim.SGD(m.parameters(), lr=0.0)\n"
        "for i in range(8):\n    loss = m(torch.ones(1, 4)).sum(); loss.backward(); o.step(); loss.item()\n",
        {"item()": 1},
    ),
    "no optimizer": Program(
        "import torch\nm = torch.nn.Linear(4, 4).cuda()\nfor i in range(6):\n"
        "    m(torch.ones(1, 4, device='cuda')).sum().item()\n",
        {"item()": 6, "blocking copy to device": 2},
        steps=0,
    ),
}
