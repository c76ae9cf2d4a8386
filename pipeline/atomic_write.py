"""Write a file of a job: a reader finds the old content or the new one, also after a power cut."""

import os
import uuid
from pathlib import Path

from storage.env import RealEnv


def write_atomically(path: Path, content: str | bytes, *, mode: int = 0o666) -> None:
    """Replace a file atomically and durably; the umask applies to `mode`."""
    data = content.encode() if isinstance(content, str) else content
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}-{uuid.uuid4().hex}")
    try:
        with open(partial, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
        RealEnv().sync_dir(str(path.parent))
    finally:
        partial.unlink(missing_ok=True)
