"""An instance whose mount is gone while its daemon still sends what is owed to the object tier, seen from outside."""

from __future__ import annotations

import time

from mount import kernel_mount
from mount.runtime import Instance, is_running, other_on, read_record
from tierfs.errors import TierfsError
from tierfs.settings_sources import settings_from_json

_PAUSE_S = 0.05
_ANSWER_WITHIN_S = 2.0


def has_object_tier(instance: Instance) -> bool:
    """Whether it was mounted with an object tier when it was mounted last."""
    try:
        return bool(settings_from_json(instance.settings.read_text()).object)
    except (OSError, ValueError, TierfsError):
        return False


def is_unmounted(instance: Instance) -> bool:
    """Whether nothing of the instance is mounted, though processes of it may run."""
    record = read_record(instance)
    if record is None:
        return False
    entry = kernel_mount.find_mount(record.mountpoint)
    return entry is None or not entry.is_tierfs or other_on(record.mountpoint, instance) is not None


def end_sending(instance: Instance, *, within_s: float) -> bool:
    """Tells the daemon to leave what is owed to the next one, and waits until nothing of the instance runs.

    False when it still runs after `within_s`, or it does not send at all: then programs use files of the mount.
    """
    from mount.cli.client import request

    deadline = time.monotonic() + within_s
    not_sending_since = None
    while is_running(instance):
        now = time.monotonic()
        if now > deadline:
            return False
        try:
            stopped = request(instance, "stop-draining", timeout_s=_ANSWER_WITHIN_S)["stopped"]
        except TierfsError:
            stopped = True  # it is just ending
        # Between the end of a mount and the start of the sending there is a moment in which it says no.
        not_sending_since = None if stopped else not_sending_since or now
        if not_sending_since is not None and now - not_sending_since > _ANSWER_WITHIN_S:
            return False
        time.sleep(_PAUSE_S)
    return True
