"""Write a file of a job: other processes see the old content or the new one, never a part."""

import os
import uuid
from pathlib import Path


def write_atomically(path: Path, content: str | bytes, *, mode: int = 0o666) -> None:
    """Replace a file atomically; the umask applies to `mode`."""
    data = content.encode() if isinstance(content, str) else content
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}-{uuid.uuid4().hex}")
    try:
        with open(partial, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            file.write(data)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
