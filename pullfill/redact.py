"""Removes logins from URLs before people see them: in messages, logs, statuses, command lines.

`url` is for what is known to be a URL, as soon as it becomes part of a message. `text` looks for
URLs in any line. Loggers and `error: ...` use it for what comes from libraries and users.
"""

from __future__ import annotations

import re

_SCHEME = r"[A-Za-z][A-Za-z0-9+.-]*://"
_NEXT = re.compile(rf",(?=\s*{_SCHEME})")
_BEGIN = re.compile(rf"\s*(?:{_SCHEME})?")
# A login ends at the last @ before the path. RFC 3986 wants other special characters escaped. The
# scheme is not looked for: in a long line without one that would take seconds.
_LOGIN = re.compile(r"(://)[^\s/?#]*@")


def url(urls: str) -> str:
    """Return `URL` or `URL,URL` without user and password, and without what follows a `?`.

    In doubt more is left out: passwords may hold characters that should have been escaped."""
    return ",".join(map(_one, _NEXT.split(urls)))


def text(line: str) -> str:
    """Return any text without the logins of URLs in it."""
    return _LOGIN.sub(r"\1", line) if "@" in line else line


def _one(part: str) -> str:
    begin = _BEGIN.match(part)
    scheme = begin.group() if begin else ""
    login, _, rest = part[len(scheme) :].rpartition("@")
    if "?" in login:
        return f"{scheme}..."
    place, query, _ = rest.partition("?")
    return f"{scheme}{place}{query and '?...'}"
