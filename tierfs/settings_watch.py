"""The settings of what others see and hear of an instance: `[metrics]` and `[events]`."""

# ruff: noqa: RUF009  (`setting` makes a dataclass field, which is what the rule asks for)

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tierfs.settings_fields import setting


@dataclass
class MetricsSettings:
    """`[metrics]`: figures for Prometheus and a status page, by HTTP."""

    listen: str = setting(
        "",
        "Where the daemon answers GET of / (a status page), /metrics, /status.json and /healthz: HOST:PORT, several "
        "with commas, such as 127.0.0.1:7118; :PORT is all addresses of this machine; empty is nowhere. It asks nobody "
        "who they are: whoever can connect reads the names and states of steps and nodes, never bytes of files, and "
        "can change nothing.",
        kind="addresses",
    )


@dataclass
class EventsSettings:
    """`[events]`: who is told what happens to steps, besides the log."""

    command: str = setting(
        "",
        "A command that is run for each event, one after the other, with the event in its environment (TIERFS_EVENT "
        "and others). It is split as a shell would, but no shell runs it.",
        kind="command",
    )
    webhook: str = setting("", "A URL that gets each event as JSON by POST, in their order.", kind="endpoint")
    webhook_token_file: Path | None = setting(
        None, "File with a token that is sent to the webhook as `Authorization: Bearer`.", kind="path"
    )
    only: list[str] = setting(
        [],
        "Which events the command and the webhook get; empty is all of them. The log has all.",
        kind="texts",
        choices=("level", "under-replicated", "lost", "walk-back", "drain"),
    )
    timeout_s: float = setting(
        30.0,
        "A command that takes longer is killed, and an attempt at the webhook that does has failed.",
        kind="duration",
        least=1,
    )
    retry_for_s: float = setting(
        300.0, "How long an event is tried to be sent to the webhook, with growing pauses.", kind="duration"
    )
