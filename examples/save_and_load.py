"""Two steps saved and the newest loaded, by stock PyTorch alone: `python examples/save_and_load.py /ckpt/run1`."""

import sys
import time
import warnings

import torch
import torch.distributed.checkpoint as dcp

warnings.simplefilter("ignore")  # that this is one process only
run = sys.argv[1] if len(sys.argv) > 1 else "/ckpt/run1"


def state(step: int) -> dict:
    return {"weight": torch.full((8 << 20,), float(step)), "step": step}  # 32 MiB


for step in (1, 2):
    begin = time.monotonic()
    dcp.save(state(step), checkpoint_id=f"{run}/step_{step}")
    print(f"saved {run}/step_{step} in {time.monotonic() - begin:.2f} s")

loaded = state(0)
dcp.load(loaded, checkpoint_id=f"{run}/latest")
if loaded["step"] != 2 or not torch.equal(loaded["weight"], state(2)["weight"]):
    raise SystemExit(f"{run}/latest is not what was saved as step 2")
print(f"loaded {run}/latest: step {loaded['step']}, every bit as it was saved")
