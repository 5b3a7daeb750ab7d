"""The hosts, torch and Lightning: what differs by version, and versions that are refused."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, requires, version

from lightning_cyclic.compat import Callback
from packaging.requirements import Requirement
from packaging.version import Version

from lightning_cyclic.errors import ConfigurationError

try:
    except ImportError:  # Lightning has it from 2.6 on

    class WeightAveraging(Callback):  # type: ignore[no-redef]
        """Be no callback's class."""


__all__ = ["WeightAveraging", "check_hosts"]
_PACKAGE = "lightning-cyclic"
_HOSTS = ("torch", "lightning")


def check_hosts() -> None:
    """Refuse versions that the package does not declare, as pip would have, had it been asked.

    Raises:
        ConfigurationError: with the version.
    """
    try:
        lines = requires(_PACKAGE) or []
    except PackageNotFoundError:  # sources that are not installed declare nothing
        return
    for wanted in map(Requirement, lines):
        if wanted.name not in _HOSTS:
            continue
        found = version(wanted.name)
        # some vendors ship a release under the name of its alpha
        if not wanted.specifier.contains(Version(found).base_version):
            raise ConfigurationError(
                f"{wanted.name} {found} is installed; allowed: {wanted}; "
                f"use pip install '{wanted}'"
            )
    from lightning_cyclic.compat import WeightAveraging
