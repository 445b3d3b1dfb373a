"""The alert rules and the dashboard: sound, and of figures that there are."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import yaml

from mount.metrics_catalogue import Metric, all_metrics
from tests.conftest import repository
from tests.watch.promtool import promtool

MONITORING = repository() / "deploy/monitoring"
#: What Prometheus itself has.
OTHERS = {"up"}


def exposed(metric: Metric) -> set[str]:
    endings = ("_bucket", "_sum", "_count") if metric.kind == "histogram" else ("",)
    return {metric.name + ending for ending in endings}


EXPOSED = {name: metric for metric in all_metrics() for name in exposed(metric)}


def rules() -> list[dict[str, Any]]:
    loaded = yaml.safe_load((MONITORING / "alerts.yml").read_text())
    return [rule for group in loaded["groups"] for rule in group["rules"]]


def queries() -> list[str]:
    """Every expression of the rules and the dashboard."""
    dashboard = json.loads((MONITORING / "dashboard.json").read_text())
    found = [rule["expr"] for rule in rules()]
    found += [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])]
    return found + [each["definition"] for each in dashboard["templating"]["list"] if each["type"] == "query"]


def test_rules_and_dashboard_ask_only_for_figures_that_there_are() -> None:
    asked = {name for query in queries() for name in re.findall(r"\btierfs_\w+", query)}
    assert asked <= EXPOSED.keys()
    assert len(asked) > 30


def test_they_select_by_labels_that_the_figures_have() -> None:
    of_prometheus = {"instance", "job", "le"}
    for query in queries():
        for name, selector in re.findall(r"\b(tierfs_\w+)\{([^}]*)\}", query):
            labels = set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", selector))
            assert labels <= {*EXPOSED[name].labels, *of_prometheus}, query


def test_each_figure_that_tells_of_trouble_has_an_alert() -> None:
    asked = {name for rule in rules() for name in re.findall(r"\btierfs_\w+", rule["expr"])}
    assert asked >= {"tierfs_steps", "tierfs_object_reachable", "tierfs_replication_lag_seconds", "tierfs_problems"}
    for rule in rules():
        assert rule["labels"]["severity"] in ("critical", "warning", "info")
        assert rule["annotations"]["summary"] and rule["annotations"]["description"]


def test_panels_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in json.loads((MONITORING / "dashboard.json").read_text())["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken, panel["title"]
        assert at["x"] + at["w"] <= 24
        taken |= cells


def test_prometheus_takes_the_rules() -> None:
    promtool("check", "rules", MONITORING / "alerts.yml")


def test_each_rule_fires_when_it_should() -> None:
    promtool("test", "rules", MONITORING / "alerts_test.yml")


@pytest.mark.parametrize("name", ["docs/metrics.md", "docs/events.md", "deploy/monitoring/README.md"])
def test_the_pages_name_only_settings_and_figures_that_there_are(name: str) -> None:
    from tierfs.settings import setting_keys

    text = (repository() / name).read_text()
    settings = {key.path for key in setting_keys()}
    sections = {key.section for key in setting_keys() if key.section}
    for path in re.findall(r"`((?:[a-z_0-9]+)\.(?:[a-z_]+))`", text):
        assert path in settings or path.partition(".")[0] not in sections, path
    assert set(re.findall(r"\btierfs_\w+", text)) <= EXPOSED.keys() | {metric.name for metric in all_metrics()}
