"""Writes docs/settings.md from the definitions of the settings: `python -m mount.cli.reference > docs/settings.md`."""

from __future__ import annotations

import json
from typing import Any

from tierfs.settings import NAMESPACE_SECTIONS, SettingKey, setting_keys
from tierfs.units import format_duration, format_size

INTRODUCTION = """\
# Settings

<!-- Made from tierfs/settings*.py by `python -m mount.cli.reference > docs/settings.md`; don't edit it here. -->

Each setting can come from several places. The later one in this list wins:

1. the default,
2. the TOML file: `--config FILE`, else `$TIERFS_CONFIG`, else `/etc/tierfs/NAME.toml`, else `/etc/tierfs/tierfs.toml`,
3. the environment: `TIERFS_` and the key in capitals with `_` for `.`, such as `TIERFS_RAM_BALLAST`,
4. `-o KEY=VALUE,...` of `tierfs mount`, `mount -t fuse.tierfs` and /etc/fstab,
5. flags of the command line.

`tierfs config show` lists every setting with its value and its source, `tierfs config check FILE` checks a file.
A wrong or unknown setting stops the mount with a message that names it; nothing is guessed. Only an unknown
variable of the environment does not: one that looks like a slip is warned of.

## How values are written

| kind | in text | in TOML also |
|---|---|---|
| size | `4096`, `64M` = `64MiB` = 64 * 2^20 bytes, `3GB` = 3 * 10^9 bytes; K, M, G, T, P | a number of bytes |
| share | a size, or a percentage of this machine's memory (the control group's limit if that is less): `50%` | |
| duration | seconds, or `250ms`, `30s`, `5min`, `1h30m`, `2d` | a number of seconds |
| yes or no | `true`, `on`, `yes`, `1`; `false`, `off`, `no`, `0`; a key alone in `-o` is `on` | `true`, `false` |
| list | `["one", "two"]`, or words with spaces between them | a list |
| table | `{ name = "value" }`, or `name=value` with spaces between them | a table |
| path | absolute, or from `~` | |

In `-o` a value that holds commas is put in double quotes: `-o 'steps.patterns="step_(?P<step>[0-9]{1,9})",size=3G'`.
Options of mount(8) such as `rw`, `nosuid`, `noatime`, `_netdev`, `nofail`, `x-systemd.automount` are no settings and
may stand among them.

```toml
# /etc/tierfs/tierfs.toml
size = "50%"

[retention]
ram_steps = 3

[steps.markers]
"my_framework.done" = "close"   # adds to the default markers
"trainer_state.json" = "off"    # takes a default marker out
```
"""

NAMESPACES = """\
## For some namespaces only

`[namespaces."GLOB"]` sections hold {sections} settings for the namespaces whose name matches; `*` matches `/` too.
Where several match, the later one in the file wins. In `-o` it is `namespaces.GLOB.KEY=VALUE`.

```toml
[namespaces."exp-*"]
retention.ram_steps = 1
steps.latest = "hidden"
```
"""

SECTION_TITLES = {
    "": "The instance",
    "ram": "The RAM tier",
    "steps": "Steps",
    "retention": "Retention",
    "durability": "Durability",
    "disk": "The local-disk tier",
    "persist": "Which steps go to the object tier",
    "archive": "Which of those are archived, and where",
    "transfer": "Transfers to and from the object tier",
    "s3": "S3",
    "cluster": "Several nodes",
    "etcd": "Access to etcd",
    "replication": "Copies on other nodes",
    "peer": "Transfers between nodes",
    "gateway": "The gateway for SageMaker's library",
    "log": "Logs",
    "metrics": "Metrics and the status page",
    "events": "Events",
}
KIND_NAMES = {
    "bool": "yes or no",
    "int": "whole number",
    "texts": "list",
    "patterns": "list",
    "url": "text",
    "endpoint": "text",
    "command": "text",
    "name": "text",
    "addresses": "text",
    "room": "share",
}


def settings_reference() -> str:
    """The whole page."""
    parts = [INTRODUCTION]
    for section, title in SECTION_TITLES.items():
        parts.append(f"## {title}\n" if not section else f"## {title}: `[{section}]`\n")
        parts += [_entry(key) for key in setting_keys(section) if not key.name.startswith("debug_")]
    *most, last = (f"`{name}`" for name in NAMESPACE_SECTIONS)
    parts.append(NAMESPACES.format(sections=f"{', '.join(most)} and {last}"))
    return "\n".join(parts)


def _entry(key: SettingKey) -> str:
    kind = KIND_NAMES.get(key.kind, key.kind)
    if key.choices and key.kind != "table":
        kind = " or ".join(f"`{choice}`" for choice in key.choices)
        kind = f"list of {kind}" if key.kind == "texts" else kind
    if key.kind == "room":
        kind = "`auto`, `off` or a share"
    least = f", at least {_plain(key, key.least)}" if key.least else ""
    return (
        f"### `{key.path}`\n\n{key.doc}\n\n- {kind}{least}; environment `{key.variable}`\n- default: {_default(key)}\n"
    )


def _default(key: SettingKey) -> str:
    if key.path == "size":
        return "`50%`"
    if key.default in (None, "", [], {}):
        return "none"
    if isinstance(key.default, list):
        return "".join(f"\n  - `{entry}`" for entry in key.default)
    if isinstance(key.default, dict):
        return "".join(f"\n  - `{name}`: {value}" for name, value in key.default.items())
    return f"`{_plain(key, key.default)}`"


def _plain(key: SettingKey, value: Any) -> str:
    if isinstance(value, bool):
        return json.dumps(value)
    if key.kind in ("size", "share"):
        return format_size(value)
    if key.kind == "duration":
        return format_duration(value)
    return str(value)


if __name__ == "__main__":
    print(settings_reference(), end="")
