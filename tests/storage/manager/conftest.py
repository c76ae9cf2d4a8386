"""An in-memory file system for each test."""

import pytest

from tests.support.storage.memory_env import MemoryEnv


@pytest.fixture
def env() -> MemoryEnv:
    return MemoryEnv(seed=8)
