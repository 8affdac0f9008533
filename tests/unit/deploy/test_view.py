"""Lines about processes that start, where there is no terminal."""

from __future__ import annotations

import io

from rich.console import Console

from pullfill.deploy.view import ProcessView


def test_plain_lines_where_there_is_no_terminal() -> None:
    stream = io.StringIO()
    view = ProcessView(Console(file=stream), "x")
    with view:
        view.set("etcd", "starting", "http://[::1]:1")
        view.set("etcd", "starting", "http://[::1]:1")
        view.set("etcd", "ready")
    lines = stream.getvalue().splitlines()
    assert len(lines) == 2
    assert "http://[::1]:1" in lines[0]
    assert "ready after" in lines[1]
