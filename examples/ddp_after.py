"""ddp_before.py with our parts: planned buckets, a 2D-torus all-reduce in bf16, LARS. The new lines are marked."""

import argparse
import json

import torch
import torch.distributed as dist
from ddp_before import batch, network
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hyperbatch import (  # new
    LARS,
    GridComm,
    RankGrid,
    ddp_bucket_bytes,
    ddp_kwargs,
    param_groups,
    plan_groups,
    register_ddp_hook,
)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    steps = parser.parse_args().steps

    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(rank)

    module = network()
    plan = plan_groups(module, "cubic")  # new: few tensors first, so that sending starts early
    model = DistributedDataParallel(module, **ddp_kwargs(plan))  # new argument
    comm = GridComm(RankGrid(1, ranks))  # new: one host; RankGrid(hosts, ranks per host) on a cluster
    register_ddp_hook(model, comm, algorithm="torus", wire_dtype=torch.bfloat16)  # new
    optimizer = LARS(param_groups(module, 5e-5), lr=2.0, momentum=0.9, trust_coefficient=0.01)  # new: was SGD

    losses = []
    for _ in range(steps):
        images, labels = batch(generator)
        loss = nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())

    if rank == 0:
        buckets = ddp_bucket_bytes(model)  # new: what DDP made of the plan
        print(json.dumps({"first_loss": losses[0], "loss": losses[-1], "ranks": ranks, "bucket_bytes": buckets}))
    comm.close()  # new
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
