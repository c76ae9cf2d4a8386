"""Decoders and encoders that pause between slices of their work."""

from collections.abc import Generator
from typing import TypeVar

T = TypeVar("T")


def drained(slices: Generator[None, None, T]) -> tuple[T, int]:
    """Run to the end. -> the result, and the number of pauses"""
    pauses = 0
    while True:
        try:
            next(slices)
            pauses += 1
        except StopIteration as stop:
            result: T = stop.value
            return result, pauses
