"""Your own loop over a model that FSDP2 shards, on GPUs or CPUs: `torchrun --nproc-per-node 2 examples/fsdp.py [OUT]`.

LAMB takes the norms of whole tensors although each rank holds a part of them, so the weights are those of one rank
without FSDP. The data is the handwritten digits that are part of the package.
"""

import os
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from hyperbatch import LAMB, create_model, open_digits, param_groups


def main(out: str | None = None, epochs: int = 8, batch_per_rank: int = 32) -> float:
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    mesh = init_device_mesh(kind, (int(os.environ["WORLD_SIZE"]),))
    rank, ranks = mesh.get_rank(), mesh.size()
    torch.manual_seed(0)  # the same weights and order of samples on every rank
    digits = open_digits()  # a part to train on, and a part to test with
    images = torch.cat([torch.tensor(part.images, device=kind) for part in digits]).permute(0, 3, 1, 2) / 255
    labels = torch.cat([torch.tensor(part.labels, device=kind) for part in digits])
    train, test = torch.arange(len(labels)).split([len(part) for part in digits])

    model = create_model("resnet8", classes=10, in_channels=1).to(kind)
    for stage in (model.layer1, model.layer2, model.layer3):
        fully_shard(stage, mesh=mesh)
    fully_shard(model, mesh=mesh)
    # After fully_shard, whose DTensors are what is trained. Earlier blocks take a smaller rate here.
    optimizer = LAMB(param_groups(model, weight_decay=0.01, layer_decay=0.9, lr=0.01), lr=0.01)

    steps = len(train) // (batch_per_rank * ranks)
    for _ in range(epochs):
        order = train[torch.randperm(len(train))]
        for step in range(steps):
            chosen = order[(step * ranks + rank) * batch_per_rank :][:batch_per_rank]
            loss = nn.functional.cross_entropy(model(images[chosen]), labels[chosen])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    if out is not None:
        weights, state = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optimizer": state}, checkpoint_id=out)  # any number of ranks can load it
    model.eval()
    with torch.no_grad():
        accuracy = (model(images[test]).argmax(1) == labels[test]).float().mean().item()
    if rank == 0:
        print(f"accuracy {accuracy:.2%} on {ranks} ranks")
    return accuracy


if __name__ == "__main__":
    main(*sys.argv[1:])
    dist.destroy_process_group()
