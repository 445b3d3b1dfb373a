"""A certificate authority for tests, by openssl."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tierfs.settings import Settings


class Authority:
    def __init__(self, directory: Path, name: str) -> None:
        directory.mkdir()
        self._directory = directory
        self.ca = directory / "ca.pem"
        self._key = directory / "ca.key"
        _openssl(
            "req", "-x509", *_EC, "-keyout", self._key, "-out", self.ca, "-days", "2", "-nodes", "-subj", f"/CN={name}"
        )

    def certify(self, settings: Settings, name: str, *, alternative: str = "") -> None:
        """A certificate for `name` (CN) in the settings; `alternative` as openssl's subjectAltName."""
        made = self._directory / (name.replace("*", "any") or "nobody")
        key, request, certificate = (made.with_suffix(suffix) for suffix in (".key", ".csr", ".pem"))
        subject = f"/CN={name}" if name else "/O=cluster"
        _openssl("req", *_EC, "-keyout", key, "-out", request, "-nodes", "-subj", subject)
        extensions = made.with_suffix(".ext")
        extensions.write_text(f"subjectAltName={alternative}\n" if alternative else "")
        _openssl(
            "x509", "-req", "-in", request, "-CA", self.ca, "-CAkey", self._key, "-CAcreateserial", "-days", "2",
            "-out", certificate, "-extfile", extensions,
        )  # fmt: skip
        settings.cluster.tls_cert, settings.cluster.tls_key, settings.cluster.tls_ca = certificate, key, self.ca


_EC = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1")


def _openssl(*arguments: object) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True, timeout=30)
