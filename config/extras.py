"""How to install the packages that only some features need."""

from typing import Final

PIPELINE_PACKAGES: Final = ("pyspark", "pyarrow", "pandas")  # of the extra `pipeline`


def install_command(extra: str) -> str:
    """Return the command that installs an extra of pyproject.toml, for messages.

    Varve is in no package index: `pip install varve` would install something else.
    """
    return f"`.venv/bin/pip install -e '.[{extra}]'` in a checkout of Varve"
