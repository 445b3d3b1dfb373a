"""The boto3 client of one bucket: made when it is needed, and again when its credentials turned out to be past.

Credentials come from boto3's standard chain: environment, profile, web identity (IRSA), container (Pod Identity),
instance metadata. The last three renew themselves in the client; those of a file are read once by it, so that a
daemon that runs for weeks needs a new client when somebody renewed the file.
"""

from __future__ import annotations

import threading
import time
from typing import Any
from urllib.parse import urlsplit

import boto3  # type: ignore[import-untyped]
from botocore.config import Config  # type: ignore[import-untyped]

from tierfs.errors import SettingsError
from tierfs.settings import S3Settings

#: Attempts of one request by the client itself, the first included: a connection that was idle for too long is gone
#: when it is used again. All longer retries are the caller's: it knows for how long, and slows down for throttling.
_ATTEMPTS = 2
_CONNECT_S = 5.0
#: Connections kept beside those of transfers: for a listing or a small object meanwhile.
_POOL_SPARE = 2
#: A new client at most so often: a key that stays wrong must not make each request read files and ask for tokens.
RENEW_EVERY_S = 10.0
_DEFAULT_REGION = "us-east-1"


class S3Clients:
    """Thread-safe. `current` may raise what boto3 raises for credentials and profiles."""

    def __init__(self, settings: S3Settings, connections: int) -> None:
        if settings.ca_bundle and not settings.ca_bundle.is_file():
            raise SettingsError(f"s3.ca_bundle: {settings.ca_bundle} is not a file", key="s3.ca_bundle")
        self._settings = settings
        self._connections = connections
        self._lock = threading.Lock()
        self._client: Any = None
        self._made_at = 0.0
        self.endpoint = settings.endpoint_url or "Amazon S3"

    def current(self) -> Any:
        with self._lock:
            if self._client is None:
                self._client = self._made()
                self._made_at = time.monotonic()
                self.endpoint = str(self._client.meta.endpoint_url)
            return self._client

    def renew(self, failed: Any) -> None:
        """The next call makes a new client, unless `failed` was already replaced or is quite new."""
        with self._lock:
            if self._client is failed and time.monotonic() - self._made_at >= RENEW_EVERY_S:
                # Others may be using it still; its connections close with the last of them.
                self._client = None

    @property
    def is_amazon(self) -> bool:
        return _is_amazon(self.endpoint)

    def close(self) -> None:
        with self._lock:
            client, self._client = self._client, None
        if client is not None:
            client.close()

    def _made(self) -> Any:
        session = boto3.session.Session(
            profile_name=self._settings.profile or None, region_name=self._settings.region or None
        )
        region = session.region_name or _DEFAULT_REGION
        style = self._settings.addressing
        client = self._client_of(session, region, "path" if style == "auto" and self._settings.endpoint_url else style)
        if style == "auto" and not _is_amazon(client.meta.endpoint_url):
            # An endpoint of AWS_ENDPOINT_URL or of the profile is known only now.
            client = self._client_of(session, region, "path")
        return client

    def _client_of(self, session: Any, region: str, addressing: str) -> Any:
        return session.client(
            "s3",
            region_name=region,
            endpoint_url=self._settings.endpoint_url or None,
            verify=str(self._settings.ca_bundle) if self._settings.ca_bundle else None,
            config=Config(
                parameter_validation=False,
                # Checksums are sent where tierfs gives them, of whole parts and without a trailer that compatible
                # servers refuse. They protect the bytes; signing these, too, would cost another pass over them.
                request_checksum_calculation="when_required",
                response_checksum_validation="when_required",
                s3={"addressing_style": addressing, "payload_signing_enabled": False},
                retries={"mode": "standard", "total_max_attempts": _ATTEMPTS},
                connect_timeout=_CONNECT_S,
                read_timeout=self._settings.read_timeout_s,
                max_pool_connections=self._connections + _POOL_SPARE,
                tcp_keepalive=True,
                user_agent_extra="tierfs",
            ),
        )


def _is_amazon(endpoint: str) -> bool:
    host = urlsplit(endpoint).hostname or ""
    return host.endswith((".amazonaws.com", ".amazonaws.com.cn", ".api.aws"))
