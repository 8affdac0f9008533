"""What another release of vLLM lacks or has changed is told, with the place that uses it."""

from __future__ import annotations

from pathlib import Path

import pytest

from pullfill.engine.names import compare, uses
from pullfill.engine.names.compare import Change, changes
from pullfill.engine.names.tree import Tree
from pullfill.errors import ConfigError
from tests.support.fake_release import write

OLD = {
    "vllm/__init__.py": "",
    "vllm/envs.py": "VLLM_LEVEL: int = 1",
    "vllm/engine.py": """
from abc import ABC, abstractmethod
from dataclasses import dataclass
class Base(ABC):
    def __init__(self): self.ready = 1
    @abstractmethod
    def must(self, a): ...
    def may(self, a, b=1): ...
    def helps(self, x): ...
    @classmethod
    def made(cls, path): ...
@dataclass
class Data:
    a: int
    b: int = 0
def parse(text, strict=False): ...
""",
}
USER = {
    "user/__init__.py": "",
    "user/a.py": """
import os
from vllm.engine import Base, Data
class Ours(Base):
    def must(self, a): return self.ready and self.own
    def own(self): ...
class Deep(Ours):
    def may(self, a, b=1): return super().may(a, b=b)
    def later(self): return self.helps(1)
def go():
    from vllm.engine import parse
    parse("x", strict=True)
    os.environ["VLLM_LEVEL"] = "1"
    return Data(a=1, b=2), Base.made("p"), Base.__name__
""",
}


def differs(tmp_path: Path, **edits: str) -> list[tuple[str, str, int]]:
    """Compare OLD with an edited copy of it: (name, what, line of user/a.py) of each change.

    edits: by module, `before=>after`, several of them with `;;` between."""
    new = dict(OLD)
    for file, edit in edits.items():
        path = f"vllm/{file}.py"
        for pair in edit.split(";;"):
            before, after = pair.split("=>")
            assert before in new[path], before
            new[path] = new[path].replace(before, after)
    old_tree = Tree(write(tmp_path / "old", OLD))
    used = [u for u in uses.of_package(write(tmp_path, USER) / "user") if not u.listed]
    found = compare.compare(used, old_tree, Tree(write(tmp_path / "new", new)))[1]
    return [(c.name, c.what, int(c.where.partition(":")[2])) for c in found if not c.added]


def test_what_stays_is_not_told(tmp_path: Path) -> None:
    engine = (
        "def helps(self, x): ...=>def helps(self, x, more=1): ...\n    def another(self): ...;;"
        "b: int = 0=>b: int = 0\n    c: int = 1"
    )
    assert differs(tmp_path, engine=engine) == []


@pytest.mark.parametrize(
    ("edit", "name", "what", "line"),
    [
        ("class Data=>class Date", "engine.Data", "is gone", 3),
        ("def parse=>def parsed", "engine.parse", "is gone", 11),
        ("strict=False=>hard=False", "engine.parse", "takes (text, hard=…), which does not", 12),
        ("b: int = 0=>c: int = 0", "engine.Data", "takes (a, c=…), which does not fit", 14),
        ("a: int\n=>a: int\n    z: int\n", "engine.Data", "takes (a, z, b=…), which", 14),
        ("made(cls, path)=>made(cls)", "engine.Base.made", "takes (), which does not fit", 14),
        ("self.ready = 1=>pass", "engine.Base.ready", "is gone", 5),
        ("def helps=>def help", "engine.Base.helps", "is gone", 9),
        ("def may(self, a, b=1)=>def may(self, a)", "engine.Base.may", "takes (a), which", 8),
        ("def may(self, a, b=1)=>def may(self, a, b=1, c=2)", "engine.Base.may",
         "takes (a, b=…, c=…), and the method that overrides it (a, b=…)", 8),
        ("def may=>@abstractmethod\n    def new(self): ...\n    def may", "engine.Base",
         "has abstract methods that pullfill's class lacks: ['new']", 7),
    ],
)  # fmt: skip
def test_what_changes_is_told(tmp_path: Path, edit: str, name: str, what: str, line: int) -> None:
    found = [f for f in differs(tmp_path, engine=edit) if f[0] == f"vllm.{name}" and f[2] == line]
    assert len(found) == 1
    assert found[0][1].startswith(what)


def test_an_environment_variable_that_is_gone_is_told(tmp_path: Path) -> None:
    assert differs(tmp_path, envs="LEVEL=>GRADE") == [("vllm.envs.VLLM_LEVEL", "is gone", 13)]


def test_a_name_that_moved_is_found(tmp_path: Path) -> None:
    old, new = dict(OLD), dict(OLD)
    new["vllm/moved.py"] = new.pop("vllm/engine.py")
    used = uses.of_package(write(tmp_path, USER) / "user")
    trees = [Tree(write(tmp_path / str(i), files)) for i, files in enumerate((old, new))]
    told = {c.name: c.what for c in compare.compare(used, *trees)[1]}
    assert told["vllm.engine.parse"] == "is gone; there is one in vllm.moved"
    assert told["vllm.engine.Base"] == "is gone; there is one in vllm.moved"
    assert "vllm.engine.Base.helps" not in told, "the class says it"
    assert compare.compare(used, trees[0], trees[0])[1] == []


def test_a_listed_function_must_take_what_it_took(tmp_path: Path) -> None:
    """It is called through an object, so nobody knows how."""
    use = uses.Use("here", ("vllm.engine", "Base.may"), listed=True)
    old = Tree(write(tmp_path / "old", OLD))
    for text, told in (
        ("def may(self, a, b=1, c=2)", ""),
        ("def may(self, *args, **kwargs)", ""),
        ("def may(self, a, c=1)", "takes (a, c=…), and took (a, b=…) before"),
        ("def may(self, a, b)", "takes (a, b), and took (a, b=…) before"),
    ):
        files = {k: v.replace("def may(self, a, b=1)", text) for k, v in OLD.items()}
        found = compare.compare([use], old, Tree(write(tmp_path / "new", files)))[1]
        assert [c.what for c in found] == ([told] if told else []), text


def test_new_methods_of_a_base_class_are_told(tmp_path: Path) -> None:
    """A class of ours may have to override them, too."""
    new = dict(OLD)
    new["vllm/engine.py"] = OLD["vllm/engine.py"].replace(
        "    def may", "    def fresh(self): ...\n    def own(self): ...\n    def may"
    )
    used = uses.of_package(write(tmp_path, USER) / "user")
    trees = [Tree(write(tmp_path / str(i), files)) for i, files in enumerate((OLD, new))]
    (change,) = compare.compare(used, *trees)[1]
    assert change == Change("vllm.engine.Base", "has new methods: fresh", "user/a.py:7", added=True)


def test_a_directory_without_vllm_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no folder vllm"):
        changes(tmp_path)
