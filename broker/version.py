"""The version of the installed distribution."""

from functools import cache


@cache
def installed_version() -> str:
    """Return the version, or "unknown" in a checkout that was never installed."""
    from importlib import metadata

    try:
        return metadata.version("varve")
    except metadata.PackageNotFoundError:
        return "unknown"
