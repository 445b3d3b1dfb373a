"""A training that can be killed at any moment and goes on where its newest whole checkpoint is. FSDP2, any devices.

    torchrun --nproc-per-node 2 -m dcp_compat.launch demo examples/train.py --namespace demo --steps 200

Run it, kill it as you like, run it again, also with another number of ranks. $TIERFS_ROOT is the mount, else /ckpt.
"""

import argparse

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from dcp_compat import TieredStager, TieredStorageReader, TieredStorageWriter, latest, persist_on_sigterm

parser = argparse.ArgumentParser()
parser.add_argument("--namespace", default="demo")
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--save-every", type=int, default=10)
parser.add_argument("--to-object-every", type=int, default=100)
options = parser.parse_args()

dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
device = torch.device("cuda", dist.get_node_local_rank()) if torch.cuda.is_available() else torch.device("cpu")
in_background = dist.new_group(backend="gloo")  # saving must not wait for the training's collectives, nor they for it

torch.manual_seed(0)
model = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(4)]).to(device)
mesh = dist.init_device_mesh(device.type, (dist.get_world_size(),))
for layer in model:
    fully_shard(layer, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)


def state(step):
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state, "step": step}


first = 1
newest = [latest(options.namespace) is not None]
dist.broadcast_object_list(newest)  # one rank looks, all do the same
if newest[0]:
    loaded = state(0)
    reader = TieredStorageReader(namespace=options.namespace)  # the newest whole step that every rank can read
    dcp.load(loaded, storage_reader=reader)
    set_state_dict(model, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
    first = loaded["step"] + 1
print(f"rank {dist.get_rank()} begins with step {first}", flush=True)

stager, saving = TieredStager(options.namespace), None
with persist_on_sigterm(options.namespace):
    for step in range(first, options.steps + 1):
        torch.manual_seed(step * dist.get_world_size() + dist.get_rank())
        batch = torch.randn(32, 256, device=device)
        loss = (model(batch) - batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % options.save_every == 0:
            if saving is not None:
                saving.result()  # one save at a time; it is long done
            tiers = ("ram", "replica", "object") if step % options.to_object_every == 0 else ("ram", "replica")
            writer = TieredStorageWriter(namespace=options.namespace, step=step, tiers=tiers, stager=stager)
            saving = dcp.async_save(state(step), storage_writer=writer, process_group=in_background)
            if dist.get_rank() == 0:
                print(f"step {step}: loss {loss.item():.6f}", flush=True)
    if saving is not None:
        saving.result()
stager.close()
dist.destroy_process_group()
