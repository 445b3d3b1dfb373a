"""The figures of one answer to Prometheus: only those of the catalogue, with just its labels, can be put in."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from mount.metrics_catalogue import all_metrics
from tierfs.watch.histogram import Histogram


class Figures:
    """What `prometheus_client` writes out: it has `collect`. KeyError, ValueError for what the catalogue lacks."""

    def __init__(self) -> None:
        self._definitions = {metric.name: metric for metric in all_metrics()}
        self._families: dict[str, Metric] = {}

    def put(self, name: str, value: float, /, **labels: str) -> None:
        """One sample; a counter's name ends in `_total`."""
        family = self._family(name)
        if not isinstance(family, GaugeMetricFamily | CounterMetricFamily):
            raise ValueError(f"{name} is a histogram")
        family.add_metric(self._values(name, labels), value)

    def put_all(self, name: str, label: str, values: Iterable[tuple[str, float]]) -> None:
        """A sample for each value of the metric's one label."""
        for text, value in values:
            self.put(name, value, **{label: text})

    def put_histogram(self, name: str, histogram: Histogram, /, **labels: str) -> None:
        family = self._family(name)
        if not isinstance(family, HistogramMetricFamily):
            raise ValueError(f"{name} is no histogram")
        # As Prometheus' text format writes numbers.
        buckets = [("+Inf" if math.isinf(bound) else str(bound), count) for bound, count in histogram.buckets()]
        family.add_metric(self._values(name, labels), buckets, histogram.total)

    def collect(self) -> Iterator[Metric]:
        """In the order of the catalogue."""
        yield from (self._families[name] for name in self._definitions if name in self._families)

    def _family(self, name: str) -> Metric:
        if name not in self._families:
            defined = self._definitions[name]
            kinds = {"gauge": GaugeMetricFamily, "counter": CounterMetricFamily, "histogram": HistogramMetricFamily}
            self._families[name] = kinds[defined.kind](name, defined.help, labels=defined.labels)
        return self._families[name]

    def _values(self, name: str, labels: dict[str, str]) -> list[str]:
        defined = self._definitions[name]
        if labels.keys() != set(defined.labels):
            raise ValueError(f"{name} has the labels {defined.labels}, not {tuple(labels)}")
        # Names that are no valid UTF-8 carry surrogate escapes, which can't be sent.
        return [labels[label].encode("utf-8", "backslashreplace").decode() for label in defined.labels]
