"""What the contract tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.frontend_http import Served, serve


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One frontend process for all tests; each brings its own workers and takes them away again."""
    with serve(tmp_path_factory.mktemp("frontend")) as frontend:
        yield frontend
