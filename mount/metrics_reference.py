"""Writes docs/metrics.md from the metrics' definitions: `python -m mount.metrics_reference > docs/metrics.md`."""

from __future__ import annotations

from mount.metrics_catalogue import SECTIONS, Metric

INTRODUCTION = """\
# Metrics and the status page

<!-- Made by `python -m mount.metrics_reference > docs/metrics.md` from mount/metrics_catalogue.py; edit that. -->

```sh
pip install 'tierfs[metrics]'
tierfs mount /ckpt -o metrics.listen=127.0.0.1:7118
```

| address | answers |
|---|---|
| `/` | a page for people: the steps of each namespace and where their bytes are, the nodes, what is wrong |
| `/metrics` | the figures below, in Prometheus' text format or OpenMetrics, as the scraper asks |
| `/status.json` | what `tierfs status --json` prints ([cli.md](cli.md)) |
| `/healthz` | 200 while it is mounted, 503 while an unmounted daemon still sends what is owed: for probes |

It is off unless `metrics.listen` says where; `tierfs status` shows the address. There is neither TLS nor a password:
whoever can connect reads the names and states of steps and nodes, though never bytes of files, and can change nothing.
So listen on a loopback address beside an agent, or at an address (in Kubernetes with a NetworkPolicy) that only the
monitoring reaches. Several instances of one machine need different ports; where one is taken, that is a warning of
`tierfs status` and is tried again, and the mount works on.

```yaml
scrape_configs:
  - job_name: tierfs
    scrape_interval: 15s
    static_configs: [{targets: ["127.0.0.1:7118"]}]
```

Requests are answered from what the daemon knows: neither the object store nor other nodes are asked. What takes time by
the number of files is read piece by piece, so that no program waits for it; the page and `/status.json` are up to half
a second old. Timing a request of the kernel costs half a microsecond, where a request takes fifty or more;
`bench/watch.py` measures both.

What is counted begins at 0 with each daemon, but for `tierfs_fuse_requests_total`, `tierfs_fuse_resent_total`,
`tierfs_takeovers_total` and the channel's bytes, which last as long as the mount. What every node of a cluster sees
alike (`tierfs_steps`, `tierfs_recovery_point_age_seconds`, …) every node exposes; use `max by (namespace)`, not `sum`.

[deploy/monitoring](../deploy/monitoring) has alert rules and a dashboard for Grafana.

## How much would be lost

`tierfs_recovery_point_age_seconds{tier="object"}` is the age of the newest step in the object tier: so much training is
lost if all nodes go now. With `tier="replica"` it is what is lost if this node goes, with `tier="ram"` if a job is only
started again. It grows while nobody trains, too; so alerts look at how much older one tier's newest step is than
another's:

```promql
max by (namespace) (tierfs_recovery_point_age_seconds{tier="object"})
  - max by (namespace) (tierfs_recovery_point_age_seconds{tier="ram"})
```

A namespace whose policy sends nothing by itself (`persist.policy` demand or none) has no age for the object tier before
its first step is there, and one with `replication.replicas = 1` none for copies.
"""

_NEEDS = {
    "": "",
    "object": " Only with an object tier.",
    "cluster": " Only with a catalogue.",
    "disk": " Only with a disk tier.",
}


def metrics_reference() -> str:
    """The whole page."""
    parts = [INTRODUCTION]
    for section in SECTIONS:
        parts.append(f"## {section.title}\n")
        parts.append("| name | kind | labels | says |\n|---|---|---|---|")
        parts.append("\n".join(_row(metric) for metric in section.metrics) + "\n")
    return "\n".join(parts)


def _row(metric: Metric) -> str:
    labels = ", ".join(f"`{label}`" for label in metric.labels)
    return f"| `{metric.name}` | {metric.kind} | {labels} | {metric.help}{_NEEDS[metric.needs]} |"


if __name__ == "__main__":
    print(metrics_reference(), end="")
