"""Who may talk to whom: the secret or the certificates of the cluster, and what they are good for.

| settings                    | authentication                        | on the wire                                  |
|-----------------------------|---------------------------------------|----------------------------------------------|
| tls_cert, tls_key, tls_ca   | mutual TLS, and the secret if given   | TLS 1.3; with encryption=off tickets (below) |
| secret_file                 | HMAC-SHA256 by challenge, both ways   | plain, frames carry tags                     |
| none of them                | none                                  | loopback only                                |

With certificates and `encryption=off` a connection by TLS brings a **ticket**, a key for some time, and the connections
after it are plain and authenticated with it as with a secret.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import ssl
import stat
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import trio

from tierfs.errors import PeerRefused, SettingsError
from tierfs.settings_cluster import ClusterSettings
from tierfs.transport.frames import Tags

LEAST_SECRET_BYTES = 16
MOST_SECRET_BYTES = 4096
NONCE_BYTES = 32
#: A client asks for another ticket long before; a server that was started again knows none of the old ones.
TICKET_S = 3600.0
_MOST_TICKETS = 4096
_LABEL = b"tierfs peer 1 "


class Proofs:
    """What one handshake proves, of a key that both sides have and of all that was said so far.

    The hellos carry both nodes' ids and a nonce of each, so nothing of it fits another pair of nodes or another time.
    """

    def __init__(self, key: bytes, client_hello: bytes, server_hello: bytes) -> None:
        transcript = hashlib.sha256()
        for each in (client_hello, server_hello):
            transcript.update(len(each).to_bytes(8, "big") + each)
        self._key = key
        self._said = transcript.digest()

    def _derive(self, what: bytes) -> bytes:
        return hmac.new(self._key, _LABEL + what + self._said, hashlib.sha256).digest()

    @property
    def client(self) -> str:
        return self._derive(b"client").hex()

    @property
    def server(self) -> str:
        return self._derive(b"server").hex()

    def tags(self) -> tuple[Tags, Tags]:
        """Of what the client sends, and of what the server sends."""
        return Tags(self._derive(b"from client")), Tags(self._derive(b"from server"))


def require_proof(given: str, expected: str, who: str) -> None:
    if not hmac.compare_digest(given.encode("utf-8", "replace"), expected.encode("ascii")):
        raise PeerRefused(f"{who} does not know the secret of this cluster (cluster.secret_file)")


@dataclass(frozen=True)
class _Certificates:
    cert: Path
    key: Path
    ca: Path

    def context(self, *, server: bool) -> ssl.SSLContext:
        """Read anew for each use: certificates are renewed while the daemon runs. SettingsError."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False  # the node's id is what is checked, see `require_name`
        context.verify_mode = ssl.CERT_REQUIRED
        try:
            context.load_cert_chain(self.cert, self.key, password=_no_password)
            context.load_verify_locations(self.ca)
        except (OSError, ValueError) as error:
            raise SettingsError(
                f"cluster.tls_cert, tls_key and tls_ca ({self.cert}, {self.key}, {self.ca}) can't be used: {error}",
                key="cluster.tls_cert",
            ) from None
        return context


def _no_password() -> str:
    raise ValueError("the key is encrypted with a password; give one without")


class Credentials:
    """Of this node, from its settings. SettingsError says what is missing or contradicts; files are read at once."""

    def __init__(self, settings: ClusterSettings) -> None:
        self.cluster = settings.name
        self.secret = read_secret(settings.secret_file) if settings.secret_file is not None else None
        self._certificates = _certificates_of(settings)
        self.encrypt = settings.encryption != "off"
        if settings.encryption == "on" and self._certificates is None:
            raise SettingsError(
                "cluster.encryption is on, which takes certificates: set cluster.tls_cert, tls_key and tls_ca "
                "(a secret authenticates and does not encrypt), or set encryption = auto",
                key="cluster.encryption",
            )
        if self._certificates is not None:
            self._certificates.context(server=True)  # wrong files are found at the start

    @property
    def tls(self) -> bool:
        return self._certificates is not None

    @property
    def by_ticket(self) -> bool:
        """Certificates authenticate, and what follows is not encrypted."""
        return self.tls and not self.encrypt

    @property
    def none(self) -> bool:
        return not self.tls and self.secret is None

    def context(self, *, server: bool) -> ssl.SSLContext:
        assert self._certificates is not None
        return self._certificates.context(server=server)


class Tickets:
    """Those that this node gave out: keys by id, with the node that each is for."""

    def __init__(self) -> None:
        self._given: OrderedDict[str, tuple[str, bytes, float]] = OrderedDict()

    def give(self, node: str) -> tuple[str, bytes]:
        while len(self._given) >= _MOST_TICKETS:
            self._given.popitem(last=False)
        name, key = secrets.token_hex(16), secrets.token_bytes(32)
        self._given[name] = (node, key, trio.current_time() + TICKET_S)
        return name, key

    def key(self, name: str, node: str) -> bytes | None:
        owner, key, until = self._given.get(name, ("", b"", 0.0))
        return key if owner == node and trio.current_time() < until else None


def read_secret(path: Path) -> bytes:
    """Its bytes without white space around them. SettingsError where it is missing, short, or others may read it."""

    def wrong(what: str) -> SettingsError:
        return SettingsError(f"cluster.secret_file {path} {what}", key="cluster.secret_file")

    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            secret = file.read(MOST_SECRET_BYTES + 1).strip()
    except OSError as error:
        raise wrong(f"can't be read: {error.strerror}") from None
    if not stat.S_ISREG(status.st_mode):
        raise wrong("is no file")
    if stat.S_IMODE(status.st_mode) & 0o077:
        raise wrong(f"may be read by others (mode {stat.S_IMODE(status.st_mode):o}): chmod 600 it")
    if not LEAST_SECRET_BYTES <= len(secret) <= MOST_SECRET_BYTES:
        raise wrong(f"must hold {LEAST_SECRET_BYTES} to {MOST_SECRET_BYTES} bytes: make it with `openssl rand -hex 32`")
    return secret


def require_name(certificate: dict[str, Any] | None, node: str) -> None:
    """PeerRefused where the names in a certificate (CN, DNS names) are not the node's. The id itself, the first part of
    a host's name, or a wildcard fits; a certificate without names is any node's."""
    names = list(_names(certificate or {}))
    if names and not any(name in (node, "*") or name.partition(".")[0] in (node, "*") for name in names):
        raise PeerRefused(
            f"the certificate of what calls itself {node} is made out to {', '.join(names)[:200]}: it must name the "
            "node's id, a wildcard, or nobody"
        )


def _names(certificate: dict[str, Any]) -> Iterable[str]:
    for kind, name in certificate.get("subjectAltName", ()):
        if kind == "DNS":
            yield name
    for group in certificate.get("subject", ()):
        for kind, name in group:
            if kind == "commonName":
                yield name


def _certificates_of(settings: ClusterSettings) -> _Certificates | None:
    given = {"tls_cert": settings.tls_cert, "tls_key": settings.tls_key, "tls_ca": settings.tls_ca}
    missing = [f"cluster.{name}" for name, path in given.items() if path is None]
    if len(missing) == len(given):
        return None
    if missing:
        raise SettingsError(f"mutual TLS takes tls_cert, tls_key and tls_ca: set {', '.join(missing)}", key=missing[0])
    assert settings.tls_cert is not None and settings.tls_key is not None and settings.tls_ca is not None
    return _Certificates(settings.tls_cert, settings.tls_key, settings.tls_ca)
