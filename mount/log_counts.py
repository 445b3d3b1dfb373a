"""Counts what is logged, so that a rise of warnings shows without anybody reading logs."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from tierfs.logs import ROOT_LOGGER, part_of


class LogCounts(logging.Handler):
    """`counts` by level and part of the product, of warnings and worse."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.counts: Counter[tuple[str, str]] = Counter()

    def emit(self, record: logging.LogRecord) -> None:
        self.counts[record.levelname.lower(), part_of(record)] += 1

    @contextmanager
    def counting(self) -> Iterator[None]:
        """For the time of the block."""
        logger = logging.getLogger(ROOT_LOGGER)
        logger.addHandler(self)
        try:
            yield
        finally:
            logger.removeHandler(self)
