"""Reads small files that the settings name: passwords, tokens, certificates and keys."""

import errno
import os


def read_small_file(path: str, bytes_max: int) -> bytes:
    """Return the content of a file, or its first `bytes_max` + 1 bytes. Raises OSError.

    A pipe without a writer is empty. The broker reads these files at its start and at each SIGHUP,
    and would wait for ever for a writer.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except ValueError:
        raise OSError(errno.EINVAL, "the path contains a NUL character", path) from None
    with open(fd, "rb") as stream:
        os.set_blocking(fd, True)  # the writer of a pipe, if there is one, may take its time
        return stream.read(bytes_max + 1)
