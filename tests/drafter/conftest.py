"""The tiny pair of the evaluation's tests, here too."""

from tests.evaluate.conftest import pair

__all__ = ["pair"]
