"""What etcd and gRPC say when something failed, as the errors of the catalogue."""

from __future__ import annotations

import grpc  # type: ignore[import-untyped]

from tierfs.errors import CatalogCompacted, CatalogDenied, CatalogError, CatalogUnavailable, LeaseLost

_CODE = grpc.StatusCode
# etcd's own sentences (api/v3rpc/rpctypes/error.go), where the code alone does not tell.
_NO_LEADER = "no leader"
_TOKENS = ("invalid auth token", "revision of auth store is old")
_AUTH = ("authentication", "user name is empty", "auth token", "auth store", "permission denied")
_GONE = ("required revision has been compacted", "required revision is a future revision")


class Refused(Exception):
    """A call did not succeed: gRPC's code, and the sentence of whoever refused it."""

    def __init__(self, call: str, endpoint: str, code: grpc.StatusCode, details: str) -> None:
        super().__init__(f"{call} by {endpoint}: {code.name}: {details}")
        self.call = call
        self.endpoint = endpoint
        self.code = code
        self.details = details

    @property
    def is_timeout(self) -> bool:
        return bool(self.code is _CODE.DEADLINE_EXCEEDED)

    @property
    def is_connection(self) -> bool:
        """The member is away, or is of no use now; another one may be of use."""
        return self.code in (_CODE.UNAVAILABLE, _CODE.CANCELLED, _CODE.UNIMPLEMENTED)

    @property
    def is_no_leader(self) -> bool:
        """Refused before anything was done."""
        return self.code is _CODE.UNAVAILABLE and self.details.endswith(_NO_LEADER)

    @property
    def is_token(self) -> bool:
        """The token is not valid (any more): refused before anything was done."""
        return self.code is _CODE.UNAUTHENTICATED or any(text in self.details for text in _TOKENS)

    @property
    def is_history(self) -> bool:
        """The revision asked for is forgotten, or was never reached."""
        return self.code is _CODE.OUT_OF_RANGE and any(text in self.details for text in _GONE)


def error_of(refused: Refused) -> CatalogError | ValueError:
    said = f"etcd at {refused.endpoint}: {refused.call}: {refused.details or refused.code.name}"
    if refused.code is _CODE.NOT_FOUND and "lease" in refused.details:
        return LeaseLost(f"{said}: the lease has run out")
    if refused.is_history:
        return CatalogCompacted(said)
    if is_denied(refused):
        return CatalogDenied(f"{said}; see etcd.user, etcd.password_file and etcd.cert")
    if "certificate" in refused.details.lower():
        return CatalogDenied(f"{said}; see etcd.ca, etcd.cert and etcd.key")
    if refused.is_timeout:
        return CatalogUnavailable(f"etcd at {refused.endpoint}: {refused.call}: no answer in time")
    too_large = refused.code is _CODE.RESOURCE_EXHAUSTED and "larger than max" in refused.details
    if refused.code is _CODE.INVALID_ARGUMENT or too_large:
        return ValueError(said)
    return CatalogUnavailable(said)


def is_denied(refused: Refused) -> bool:
    if refused.code in (_CODE.PERMISSION_DENIED, _CODE.UNAUTHENTICATED):
        return True
    asked_wrongly = refused.code in (_CODE.INVALID_ARGUMENT, _CODE.FAILED_PRECONDITION)
    return asked_wrongly and any(text in refused.details for text in _AUTH)
