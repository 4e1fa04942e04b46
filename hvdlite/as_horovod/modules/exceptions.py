"""``horovod.common.exceptions``."""

from __future__ import annotations

from hvdlite.errors import HorovodInternalError, HostsUpdatedInterrupt

__all__ = ["HorovodInternalError", "HorovodVersionMismatchError", "HostsUpdatedInterrupt", "get_version_mismatch_message"]


def get_version_mismatch_message(name: str, version: str, installed_version: str) -> str:
    """Say that a framework's version is not the one it was built with."""
    return f"{name}: this is version {version}, built with {installed_version}: install hvdlite's requirements anew"


class HorovodVersionMismatchError(ImportError):
    """Never raised: hvdlite is not built against a framework. Scripts may catch it."""

    def __init__(self, name: str, version: str, installed_version: str) -> None:
        super().__init__(get_version_mismatch_message(name, version, installed_version))
        self.name = name
        self.version = version
        self.installed_version = installed_version
