"""A plain loop as a subject. What do its metrics cost?

steptime overhead --subject plain_loop.py
steptime gate --base HEAD~1 --subject plain_loop.py"""

import torch

from steptime import Periodic, Steps


def make():
    """Called once; what it returns is measured."""
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 8)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches = [(torch.randn(256, 64), torch.randint(0, 8, (256,))) for _ in range(4)]
    batches = [(inputs.to(device), labels.to(device)) for inputs, labels in batches]
    norms = [False]

    def step(i):
        inputs, labels = batches[i]
        loss = torch.nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        if norms[0]:
            for parameter in model.parameters():
                parameter.grad.norm().item()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    def enable_norms(on):
        norms[0] = on

    def histograms():
        for parameter in model.parameters():
            torch.histc(parameter.detach().cpu(), bins=64)

    return Steps(
        step,
        cycle=4,
        tokens=256,
        switches={"norms": enable_norms, "histograms": Periodic(every=100, act=histograms)},
    )


if __name__ == "__main__":
    subject = make()
    for number in range(20):
        print(float(subject.step(number % subject.cycle)))
