"""Amazon's SageMaker checkpointing library, as it comes from PyPI, in the ranks of a test."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from rig import checkpoints
from rig.instance import Instance
from rig.ranks import preload

preload("amzn_sagemaker_checkpointing.checkpointing.filesystem", "amzn_sagemaker_checkpointing.config.s3_path_strategy")
#: Where the library looks for its in-memory tier, and can't be told otherwise.
SERVICE = "ai-toolkit-gossip-headless.aws-hyperpod.svc.cluster.local"
PORT = 9200
#: Where it writes a log of its own.
LOGS = Path("/var/log/sagemaker_checkpointing")


@dataclass(frozen=True)
class Job:
    """A training with the library. `gateway` is what the name of its service leads to on this rank's node,
    `environment` what its S3 clients need."""

    namespace: str
    world: int = 2
    gateway: tuple[str, int] = ("127.0.0.1", PORT)
    s3: str = ""
    is_ray: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)
    size_bytes: int = 4 << 20

    def config(self, *, save_to_s3: bool = False) -> Any:
        from amzn_sagemaker_checkpointing.config.s3_path_strategy import RayS3PathStrategy
        from amzn_sagemaker_checkpointing.config.sagemaker_checkpoint_config import SageMakerCheckpointConfig

        logger = logging.getLogger("sagemaker-in-a-test")
        logger.setLevel(logging.CRITICAL)
        layout = {"s3_path_strategy": RayS3PathStrategy(self.s3)} if self.is_ray else {"s3_tier_base_path": self.s3}
        return SageMakerCheckpointConfig(
            namespace=self.namespace, world_size=self.world, save_to_s3=save_to_s3, logger=logger, **layout
        )

    def enter(self) -> None:
        """Once in each rank: the service's name leads to the gateway, as DNS and a Service do in a cluster."""
        os.environ.update(self.environment)
        resolve = socket.getaddrinfo
        if getattr(resolve, "leads_to", None) == self.gateway:
            return

        def lead(host: Any, port: Any, *arguments: Any, **options: Any) -> Any:
            if (host, port) == (SERVICE, PORT):
                host, port = self.gateway
            return resolve(host, port, *arguments, **options)

        lead.leads_to = self.gateway  # type: ignore[attr-defined]
        socket.getaddrinfo = lead

    def writer(self, step: int, *, save_to_s3: bool = False) -> Any:
        from amzn_sagemaker_checkpointing.checkpointing.filesystem import SageMakerTieredStorageWriter

        return SageMakerTieredStorageWriter(checkpoint_config=self.config(save_to_s3=save_to_s3), step=step)

    def reader(self, step: int | None = None) -> Any:
        from amzn_sagemaker_checkpointing.checkpointing.filesystem import SageMakerTieredStorageReader

        return SageMakerTieredStorageReader(checkpoint_config=self.config(), step=step)

    def save(self, step: int, seed: int, *, save_to_s3: bool = False) -> None:
        writer = self.writer(step, save_to_s3=save_to_s3)
        dcp.async_save(checkpoints.state(seed, self.size_bytes), storage_writer=writer).result()
        dist.barrier()

    def load(self, step: int | None = None) -> dict[str, Any]:
        """Into a state of other values; raises what the library raises."""
        target = checkpoints.empty_state(self.size_bytes)
        dcp.load(target, storage_reader=self.reader(step))
        return target

    def check(self, seed: int, step: int | None = None) -> None:
        wrong = checkpoints.differences(self.load(step), seed, self.size_bytes)
        assert not wrong, f"step {step} does not hold seed {seed}: {wrong}"


def address(instance: Instance) -> tuple[str, int]:
    """Where its gateway listens."""
    host, _, port = instance.options["gateway.listen"].partition(":")
    return host, int(port)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextlib.contextmanager
def without_logs_left() -> Iterator[None]:
    """The library's own logs are gone afterwards, where they were not there before."""
    was_there = LOGS.exists()
    yield
    if not was_there:
        shutil.rmtree(LOGS, ignore_errors=True)
