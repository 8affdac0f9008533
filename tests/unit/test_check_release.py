"""tools/check_release.py tells what differs between two releases of vLLM, and where it is used."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.check_release import GONE, Uses, compare, load

OLD = {
    "__init__": "",
    "envs": "VLLM_LEVEL = 1\nVLLM_OTHER = 2\n",
    "parts": """
class Unnamed:
    def __init__(self):
        self._inner = 1
        self.other = 2
""",
    "engine": """
from vllm.parts import Unnamed
class Base:
    def must(self, a): ...
    def helps(self, x, *, y=0, unknown=0): ...
    def _private(self): ...
    def other(self): ...
def parse(text, strict=False): ...
def unused(): ...
""",
    "moved": "class Late: ...\ndef never(): ...\n",
    "told": "class Told:\n    def reached(self): ...\n    def other(self): ...\n",
}
OURS = """
from vllm.engine import Base, parse
class Ours(Base):
    def must(self, a): return self._private()
def go(base):
    from vllm.moved import Late
    os.environ["VLLM_LEVEL"] = "1"
    base.helps(1, y=parse("x"))
    getattr(base.unnamed, "_inner")
    return base.thing.reached()  # vllm.told
"""


def write(folder: Path, files: dict[str, str]) -> Path:
    folder.mkdir(parents=True)
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
    return folder


@pytest.mark.parametrize(
    ("module", "before", "after", "name", "what", "line"),
    [
        ("envs", "VLLM_LEVEL = 1", "", "VLLM_LEVEL", GONE, 7),
        ("moved", "class Late", "class Later", "Late", GONE, 6),
        ("engine", "strict=False", "strict", "parse", "is now required: strict", 2),
        ("engine", "*, y=0", "*", "Base.helps", "removed: y", 8),
        ("engine", "must(self, a)", "must(self, a, b=1)", "Base.must", "is new: b", 4),
        ("engine", "    def other", "    def more(): ...\n    def other", "Base.more", "new", 3),
        ("parts", "_inner", "_outer", "Unnamed._inner", GONE, 9),
    ],
)
def test_a_change_is_told_with_its_place(
    tmp_path: Path, module: str, before: str, after: str, name: str, what: str, line: int
) -> None:
    uses = Uses(write(tmp_path / "ours", {"ours": OURS}))
    old = load(write(tmp_path / "old" / "vllm", OLD).parent)
    changed = OLD | {module: OLD[module].replace(before, after)}
    new = load(write(tmp_path / "new" / "vllm", changed).parent)
    ((told, place),) = compare(uses, old, new).items()
    assert told[0] == f"vllm.{module}.{name}"
    assert what in told[1]
    assert place == f"ours/ours.py:{line}"
