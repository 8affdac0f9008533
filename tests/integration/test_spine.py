"""The path of one remote prefill may become shorter, never longer (`make spine` shows it)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import spine

pytestmark = pytest.mark.engine


def test_the_path_of_a_remote_prefill_stays_within_its_budget(tmp_path: Path) -> None:
    path = spine.record_cases(tmp_path, ["plain"])["plain"]
    roles = {call.role for call in path}
    assert roles == {"frontend", "decode", "prefill"}, "the prompt was not prefilled remotely"
    files, functions = spine.sizes(path)
    assert files <= spine.FILES, sorted({call.file for call in path})
    assert functions <= spine.FUNCTIONS
