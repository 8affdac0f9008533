"""The file of stock servers: what it may say, and what a change of it does."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from pullfill.errors import ConfigError
from pullfill.frontend.forward import sources
from pullfill.frontend.forward.sources import ServerFile, StockEntry, parse_file, read_file

PREFILL = StockEntry("prefill", "http://a:1", "k:2")
DECODE = StockEntry("decode", "http://b:3")
YAML = """\
# a comment
- role: prefill
  url: http://a:1/
  kv: k:2
- {role: D, url: "b:3"}
"""


def test_yaml_and_json() -> None:
    assert parse_file(YAML, "f") == (PREFILL, DECODE)
    rows = [{"role": "prefill", "url": "http://a:1", "kv": "k:2"}, {"role": "decode", "url": "b:3"}]
    for indent in (None, 2, "\t"):
        assert parse_file(json.dumps(rows, indent=indent), "f") == (PREFILL, DECODE)
    assert parse_file("[]", "f") == ()


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "f, line 1: the file is empty"),
        ("role: decode", "f, line 1: give a list of servers"),
        ("- decode=http://a:1", "f, line 1: give a list of servers"),
        ("- role: decode\n  url: ftp://a", "f, line 2: url: 'ftp://a' is no address of a server"),
        ("- role: x\n  url: http://a:1", "f, line 1: role: no role is called 'x'"),
        ("- role: decode\n  url: http://a:1\n  kv: k k", "f, line 3: kv: 'k k' is no KV address"),
        ("- role: decode\n  address: http://a:1", "f, line 2: address: no key is called so"),
        ("- role: decode\n  url: a:1\n  url: b:1", "f, line 3: url: stands here twice"),
        ("- role: decode\n  url:", "f, line 2: url: give one value"),
        ("- role: decode\n  url: [a]", "f, line 2: url: give one value"),
        ("- role: decode\n\n- url: b:1", "f, line 1: url: the server has none"),
        (
            "- {role: d, url: a:1}\n- {role: d, url: a:1, kv: k}",
            "f, line 2: url: http://a:1 stands",
        ),
        ("[{role: d, url: a:1}, {role: d, url: a:1}]", "stands in line 1 already"),
        ("- role: decode\n  url: 'http", "f, line 2: found unexpected end of stream"),
        ("- {role: decode,\n- x", "f, line 2: "),
        ("- [" * 5000, ": "),
        ("[" + "{role: d, url: a:1}," * 513 + "]", "512 servers at most"),
        ("\0", "f is not YAML"),
    ],
)
def test_a_broken_file_is_told_in_one_line_with_its_line_and_key(text: str, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_file(text, "f")
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_is_no_file_of_text(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="is not UTF-8 text"):
        read_file(str(path))
    path.write_bytes(b"#" * (sources.FILE_BYTES + 1))
    with pytest.raises(ConfigError, match="more than 131072 bytes"):
        read_file(str(path))
    with pytest.raises(ConfigError, match="is no file"):
        read_file(str(tmp_path))
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="is no file"):
        read_file(str(tmp_path / "pipe"))


class Watched:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.published: list[tuple[StockEntry, ...]] = []
        self.path.write_text(YAML)
        self.file = ServerFile(str(path), self.published.append)

    async def looks(self, count: int = 2) -> None:
        for _ in range(count):
            await self.file.look()


async def test_a_change_is_published_once_it_has_settled(tmp_path: Path) -> None:
    watched = Watched(tmp_path / "f")
    await watched.looks(3)
    assert watched.published == [(PREFILL, DECODE)]
    watched.path.write_text("- {role: decode, url: b:3}\n")
    await watched.looks(1)
    assert len(watched.published) == 1, "it may still be written"
    await watched.looks(3)
    assert watched.published[1:] == [(DECODE,)]
    (tmp_path / "new").write_text("[]")
    (tmp_path / "new").rename(watched.path)
    await watched.looks()
    assert watched.published[2:] == [()]


async def test_a_broken_file_keeps_the_last_good_servers_and_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    watched = Watched(tmp_path / "f")
    watched.path.write_text("- {role: decode}")
    await watched.looks(5)
    assert watched.file.trouble == (
        f"{watched.path}, line 1: url: the server has none; the last good servers stay"
    )
    assert [record.message for record in caplog.records] == [watched.file.trouble]
    watched.path.unlink()
    await watched.looks()
    assert "cannot read" in watched.file.trouble
    assert len(watched.published) == 1
    watched.path.write_text(YAML)
    await watched.looks()
    assert watched.file.trouble == ""
    assert watched.published == [(PREFILL, DECODE)] * 2


def test_a_broken_file_at_the_start_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="check --servers-file"):
        ServerFile(str(tmp_path / "none"), lambda _: None)
