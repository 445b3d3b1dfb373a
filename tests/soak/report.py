"""What a soak saw: counted, the longest stall, and each violation with what there is to find its cause by."""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Violation:
    """`at_s` is since the soak began, `logs` a directory with the nodes' logs as they were then."""

    rule: str
    at_s: float
    clock: str
    node: str
    path: str
    evidence: str
    faults: list[str]
    logs: str = ""


@dataclass
class Stall:
    seconds: float = 0.0
    what: str = ""
    node: str = ""
    path: str = ""
    faults: list[str] = field(default_factory=list)


class Report:
    """Threads may share it. Logs of violations are kept below `directory`."""

    def __init__(self, seed: int, minutes: float, directory: Path, log_directory: Path) -> None:
        self.seed, self.minutes, self.directory = seed, minutes, directory
        self._log_directory = log_directory
        self._lock = threading.Lock()
        self.begin = time.monotonic()
        self.counts: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()
        self.allowed: Counter[str] = Counter()
        self.violations: list[Violation] = []
        self.stalls: dict[str, Stall] = {}
        self.schedule: list[dict[str, Any]] = []

    def count(self, what: str, amount: int = 1) -> None:
        with self._lock:
            self.counts[what] += amount

    def fault(self, kind: str, what: str) -> None:
        with self._lock:
            self.faults[kind] += 1
            self.schedule.append({"at_s": round(self.now(), 2), "kind": kind, "what": what})
        self.say(f"fault: {what}")

    def allow(self, error: str) -> None:
        """An error that the documents allow under the faults that were there."""
        with self._lock:
            self.allowed[error] += 1

    def stalled(self, kind: str, stall: Stall) -> None:
        with self._lock:
            if stall.seconds > self.stalls.get(kind, Stall()).seconds:
                self.stalls[kind] = stall

    def now(self) -> float:
        return time.monotonic() - self.begin

    def say(self, line: str) -> None:
        print(f"{self.now():7.1f}  {line}", flush=True)

    def violate(self, rule: str, *, node: str = "", path: str = "", evidence: str, faults: list[str]) -> None:
        with self._lock:
            made = Violation(rule, round(self.now(), 2), time.strftime("%H:%M:%S"), node, path, evidence[:6000], faults)
            self.violations.append(made)
            number = len(self.violations)
        self.say(f"VIOLATION {number}: {rule}: {node} {path}: {evidence[:1500]} (faults: {faults})")
        if number <= 10:
            made.logs = str(self.directory / f"violation-{number}")
            shutil.copytree(self._log_directory, made.logs, dirs_exist_ok=True)

    def as_json(self) -> dict[str, Any]:
        return {
            "seed": self.seed,
            "minutes": self.minutes,
            "took_s": round(self.now(), 1),
            "counts": dict(sorted(self.counts.items())),
            "faults": dict(sorted(self.faults.items())),
            "faults_injected": sum(self.faults.values()),
            "longest_stalls": {kind: asdict(stall) for kind, stall in sorted(self.stalls.items())},
            "errors_allowed": dict(sorted(self.allowed.items())),
            "violations": [asdict(each) for each in self.violations],
            "schedule": self.schedule,
        }

    def text(self) -> str:
        told = self.as_json()
        lines = [f"soak of {told['took_s'] / 60:.1f} minutes, seed {self.seed}", ""]
        lines += [f"  {what:44} {count:>8,}" for what, count in told["counts"].items()]
        lines += ["", f"  faults injected {told['faults_injected']:>37,}"]
        lines += [f"    {kind:42} {count:>8,}" for kind, count in told["faults"].items()]
        if self.allowed:
            lines += ["", "  errors that the documents allow under these faults"]
            lines += [f"    {count:>6,}  {error}" for error, count in told["errors_allowed"].items()]
        lines += ["", "  longest stalls"]
        for kind, stall in told["longest_stalls"].items():
            meanwhile = f" (meanwhile: {', '.join(stall['faults'])})" if stall["faults"] else ""
            lines.append(
                f"    {kind:12} {stall['seconds']:6.2f} s in {stall['what']} of {stall['path']} on {stall['node']}"
                f"{meanwhile}"
            )
        lines += ["", f"  violations: {len(self.violations)}"]
        for each in self.violations:
            lines.append(f"    {each.at_s:.1f} s ({each.clock}) {each.rule}: {each.node} {each.path}: {each.evidence}")
            lines.append(f"      faults: {each.faults}; logs: {each.logs}")
        return "\n".join(lines) + "\n"

    def write(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        (self.directory / "report.json").write_text(json.dumps(self.as_json(), indent=2) + "\n")
        (self.directory / "report.txt").write_text(self.text())
