"""The path of one remote prefill may become shorter, never longer (`make spine` shows it)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import spine

pytestmark = pytest.mark.engine
PAGE = (spine.ROOT / "docs" / "architecture.md").read_text()


def test_a_remote_prefill_goes_the_way_of_the_document_and_within_its_budget(
    tmp_path: Path,
) -> None:
    found = spine.record_cases(tmp_path, ["plain", "hit"])
    idle = found["idle"]
    path = spine.path_of(found["plain"], idle)
    roles = {call.role for call in path}
    assert roles == {"frontend", "decode", "prefill"}, "the prompt was not prefilled remotely"
    assert spine.not_as_told(PAGE, found["hit"], idle) == []
    # The check itself can fail: a step that moved, and one in another place.
    for old, new in (("`enqueue`", "`publish_all`"), ("`enqueue`", "`finish`")):
        assert old in PAGE
        assert spine.not_as_told(PAGE.replace(old, new), found["hit"], idle)
    files, functions, hop_files, hops = spine.sizes(path)
    assert files <= spine.FILES, sorted({call.file for call in path})
    assert functions <= spine.FUNCTIONS
    assert hop_files <= spine.HOP_FILES, sorted({file for file, _ in spine.hops(path)})
    assert hops <= spine.HOPS, spine.hops(path)
