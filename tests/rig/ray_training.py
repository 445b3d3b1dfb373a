"""A run of Ray Train below a directory of the mount: `python -m rig.ray_training DIRECTORY`. Two workers, twice: the
second run goes on from what the first one reported, and from what its workers saved with DCP."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any


def train(config: dict[str, Any]) -> None:
    """In each worker."""
    import ray.train
    import torch
    import torch.distributed.checkpoint as dcp

    from dcp_compat import TieredStorageReader, TieredStorageWriter

    rank = ray.train.get_context().get_world_rank()
    namespace = Path(config["root"]) / "dcp"
    state = {"weight": torch.zeros(1000), "step": 0}
    if config["step"] > 1:
        dcp.load(state, storage_reader=TieredStorageReader(namespace=namespace))
        reported = ray.train.get_checkpoint()
        if reported is not None:
            with reported.as_directory() as directory:
                assert torch.load(Path(directory) / "model.pt")["step"] == config["step"] - 1
        assert state["step"] == config["step"] - 1 and state["weight"].eq(config["step"] - 1).all()
    state = {"weight": torch.full((1000,), float(config["step"])), "step": config["step"]}
    dcp.save(state, storage_writer=TieredStorageWriter(namespace=namespace, step=config["step"]))
    with tempfile.TemporaryDirectory() as scratch:
        checkpoint = None
        if rank == 0:
            torch.save(state, Path(scratch) / "model.pt")
            checkpoint = ray.train.Checkpoint.from_directory(scratch)
        ray.train.report({"step": config["step"]}, checkpoint=checkpoint)


def main() -> None:
    import ray
    import torch
    from ray.train import CheckpointConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    root = Path(sys.argv[1])
    ray.init(num_cpus=4, include_dashboard=False, object_store_memory=100 << 20, log_to_driver=True)
    try:
        for step in (1, 2):
            trainer = TorchTrainer(
                train,
                train_loop_config={"root": str(root), "step": step},
                scaling_config=ScalingConfig(num_workers=2, use_gpu=False),
                run_config=RunConfig(
                    name="ray", storage_path=str(root), checkpoint_config=CheckpointConfig(num_to_keep=1)
                ),
            )
            result = trainer.fit()
            assert result.checkpoint is not None
            with result.checkpoint.as_directory() as directory:
                assert Path(directory).is_relative_to(root), directory
                assert torch.load(Path(directory) / "model.pt")["step"] == step
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main()
