"""Files of secrets: whatever a path names, reading it ends."""

import os
from pathlib import Path

import pytest

from config.security.secrets import SecretError, SecretReference
from config.security.small_file import read_small_file
from config.security.token import TokenFileError, read_token


def test_a_pipe_without_a_writer_is_empty_and_is_not_waited_for(tmp_path: Path) -> None:
    pipe = str(tmp_path / "pipe")
    os.mkfifo(pipe)
    assert read_small_file(pipe, 10) == b""
    with pytest.raises(SecretError, match="expected 1 to"):
        SecretReference("file", pipe).read()
    with pytest.raises(TokenFileError, match="expected one token"):
        read_token(pipe)


def test_a_pipe_with_a_writer_is_read_to_its_end() -> None:
    reader, writer = os.pipe()
    try:
        os.write(writer, b"secret\n")
        os.close(writer)
        assert SecretReference("file", f"/dev/fd/{reader}").read() == "secret"
    finally:
        os.close(reader)


def test_a_file_without_an_end_is_read_up_to_the_limit() -> None:
    assert read_small_file("/dev/zero", 10) == bytes(11)


def test_a_path_with_a_nul_character_is_an_error_with_a_reason() -> None:
    with pytest.raises(SecretError, match="NUL"):
        SecretReference("file", "a\0b").read()
    with pytest.raises(TokenFileError, match="NUL"):
        read_token("a\0b")
