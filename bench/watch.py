"""What being watched costs: requests of a mount with metrics against one without, scraped all the time or not at all.

    PYTHONPATH=tests python bench/watch.py [--rounds 12] [--files 20000] [--json]

Two mounts of the same settings but `metrics.listen`, by turns; extended attributes are asked for, since the kernel
keeps none and each is a request that Python answers. Then one has steps of many files: how long a scrape takes, and how
much longer than otherwise the slowest requests take while it is scraped each second.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import statistics
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from measure import Row, as_json, compare, pair, single, table
from rig.instance import Instance, mounted, wait_until

REQUESTS = 3000
STEPS = 10
#: The share of requests that a scrape may delay without anybody noticing.
SLOWEST = 0.99


def rate(path: Path) -> float:
    """Requests a second."""
    began = time.perf_counter()
    for _ in range(REQUESTS):
        os.getxattr(path, "user.tierfs.tier")
    return REQUESTS / (time.perf_counter() - began)


def slow_request_ms(path: Path) -> float:
    """What all but one in a hundred requests stay below."""
    taken = []
    for _ in range(REQUESTS):
        began = time.perf_counter()
        os.getxattr(path, "user.tierfs.tier")
        taken.append(time.perf_counter() - began)
    return statistics.quantiles(taken, n=100)[round(SLOWEST * 100) - 1] * 1e3


def scrape(instance: Instance) -> tuple[float, int]:
    """Milliseconds and bytes."""
    parts = urlsplit(instance.status()["pages"][0])
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=30)
    began = time.perf_counter()
    connection.request("GET", "/metrics")
    size = len(connection.getresponse().read())
    connection.close()
    return (time.perf_counter() - began) * 1e3, size


@contextmanager
def scraped(instance: Instance, every_s: float) -> Iterator[None]:
    """Meanwhile the figures are fetched again and again."""
    done = threading.Event()

    def fetch() -> None:
        while not done.wait(every_s):
            scrape(instance)

    thread = threading.Thread(target=fetch)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def fill(instance: Instance, files: int) -> None:
    """Steps of many small files, complete by their marker."""
    for number in range(STEPS):
        step = instance.mountpoint / "run" / f"step_{number}"
        step.mkdir(parents=True)
        for index in range(files // STEPS):
            (step / f"{index}.bin").touch()
        (step / "commit_success.txt").touch()
    wait_until(lambda: sum(each["state"] == "complete" for each in instance.status()["steps"]) == STEPS, "steps", 120)


def measure(rounds: int, files: int) -> list[Row]:
    with ExitStack() as stack:
        base = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        instances, paths = {}, {}
        for name, options in {"plain": {}, "watched": {"metrics.listen": "127.0.0.1:0"}}.items():
            unique = f"bench-{uuid.uuid4().hex[:8]}"
            instances[name] = stack.enter_context(mounted(base / name, unique, size="512M", options=options))
            paths[name] = instances[name].mountpoint / "file"
            paths[name].touch()
        watched = instances["watched"]
        rows = compare(
            "requests, timed", "1/s", lambda: rate(paths["watched"]), {"untimed": lambda: rate(paths["plain"])},
            goals={"untimed": ">= 0.95"}, rounds=rounds,
        )  # fmt: skip
        fill(watched, files)
        times, quiet, busy = [], [], []
        for _ in range(rounds):
            times.append(scrape(watched)[0])
            quiet.append(slow_request_ms(paths["watched"]))
            with scraped(watched, 1.0):
                busy.append(slow_request_ms(paths["watched"]))
        rows.append(single(f"a scrape, {STEPS} steps of {files // STEPS} files", "ms", times))
        rows.append(pair("99 % of requests, scraped each second", "ms", busy, "not scraped", quiet, "<= 1.5"))
        return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--files", type=int, default=20_000, help="in all steps together")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    rows = measure(arguments.rounds, arguments.files)
    print(json.dumps(as_json(rows)) if arguments.json else table(as_json(rows)))
    return 3 if any(row.is_met is False for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
