"""The RDMA devices that this node uses, open: each with its port and what takes its completions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import trio

from tierfs.transport.verbs_port import Port
from tierfs.transport.verbs_reading import Reader


@dataclass(eq=False)
class OpenPort:
    """A device in use. It is another one after the device was gone and came back."""

    port: Port
    reader: Reader

    @property
    def name(self) -> str:
        return self.port.capabilities.device

    @property
    def gone(self) -> str:
        """Why it carries nothing any more; "" while it does. Its links and regions are useless then, but have to be
        closed all the same before the port is."""
        return self.reader.gone


class Fabric(Protocol):
    """What asking and serving share."""

    @property
    def ports(self) -> tuple[OpenPort, ...]:
        """Those that can be used now, the nearest to this node's memory first."""
        ...

    @property
    def reason(self) -> str:
        """One sentence: why there is none. "" where there is."""
        ...

    @property
    def threads(self) -> trio.CapacityLimiter:
        """For `register`, `Region.close` and opening."""
        ...

    def keep(self, port: OpenPort) -> None:
        """Somebody has links or regions of it: it is closed, when it is gone, only after `release`."""
        ...

    def release(self, port: OpenPort) -> None: ...
