"""Waits for what every measurement of the RAM tier begins with: a ballast that is filled."""

from __future__ import annotations

from typing import Any

from rig.instance import Instance, wait_until


def wait_for_ballast(instance: Instance) -> None:
    """The ballast is filled in the background after the mount; measure what comes after that."""

    def is_filled() -> bool:
        ram: dict[str, Any] = instance.status()["ram"]
        return bool(ram["ballast_bytes"] >= 0.97 * ram["ballast_target_bytes"])

    wait_until(is_filled, "the ballast is filled", timeout_s=120, every_s=0.2)
