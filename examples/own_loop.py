"""Your own loop with LARS and its schedule, on one device: `python examples/own_loop.py`. Only three lines are ours,
and the data, the handwritten digits that are part of the package.
"""

import torch
from torch import nn

from hyperbatch import LARS, create_model, open_digits, param_groups


def main(epochs: int = 12, batch: int = 64) -> float:
    torch.manual_seed(0)
    digits = open_digits()  # a part to train on, and a part to test with
    images = torch.cat([torch.tensor(part.images) for part in digits]).permute(0, 3, 1, 2) / 255
    labels = torch.cat([torch.tensor(part.labels) for part in digits])
    train, test = torch.arange(len(labels)).split([len(part) for part in digits])

    model = create_model("resnet8", classes=10, in_channels=1)
    # No decay and no trust ratio on norm parameters and biases: a flag turns either on.
    optimizer = LARS(param_groups(model, weight_decay=5e-4), lr=1.0, momentum=0.9, trust_coefficient=0.02)
    steps = epochs * (len(train) // batch)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, total_steps=steps, cycle_momentum=False)

    for _ in range(epochs):
        for chosen in train[torch.randperm(len(train))].split(batch)[: len(train) // batch]:
            loss = nn.functional.cross_entropy(model(images[chosen]), labels[chosen], label_smoothing=0.1)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()

    model.eval()
    with torch.no_grad():
        accuracy = (model(images[test]).argmax(1) == labels[test]).float().mean().item()
    ratios = optimizer.trust_ratios()
    print(f"accuracy {accuracy:.2%}; trust ratios from {min(ratios.values()):.2g} to {max(ratios.values()):.2g}")
    return accuracy


if __name__ == "__main__":
    main()
