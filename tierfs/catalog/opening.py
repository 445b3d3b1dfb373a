"""The catalogue that the settings name."""

from __future__ import annotations

from tierfs.catalog.store import KeyStore
from tierfs.errors import SettingsError
from tierfs.settings import Settings


def open_store(settings: Settings) -> KeyStore:
    """Nothing is asked of it yet. SettingsError where `catalog` is empty, or what etcd needs is not installed."""
    if not settings.catalog:
        raise SettingsError("catalog is empty: this node is alone", key="catalog")
    # Only here: nobody else needs gRPC, and it takes a tenth of a second.
    try:
        from tierfs.catalog.etcd import EtcdStore
    except ImportError as error:
        raise SettingsError(
            f"{settings.catalog} needs grpcio and protobuf: install tierfs[etcd] ({error})", key="catalog"
        ) from None
    return EtcdStore(settings)
