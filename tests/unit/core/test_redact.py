"""Nobody reads a password in a URL: not in messages, logs, statuses or command lines."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pullfill import redact

SECRET = "s3cr3t"


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("http://h:1", "http://h:1"),
        ("h:1,i:2", "h:1,i:2"),
        ("nats://u:s3cr3t@h:1", "nats://h:1"),
        ("u:s3cr3t@h:1", "h:1"),
        ("s3cr3t@h", "h"),
        ("nats://u:s3cr3t@h:1,nats://v:s3cr3t@[::1]:2", "nats://h:1,nats://[::1]:2"),
        ("http://u:a/s3cr3t@h:1", "http://h:1"),
        ("http://u:a,s3cr3t@h:1, http://i", "http://h:1, http://i"),
        ("https://h/v1?token=s3cr3t", "https://h/v1?..."),
        ("http://u:a?s3cr3t@h", "http://..."),
        ("http://h/v1?token=x@s3cr3t", "http://..."),
        ("", ""),
    ],
)
def test_a_url_without_its_login(given: str, shown: str) -> None:
    assert redact.url(given) == shown


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("lost nats://u:s3cr3t@h:1, http://v:s3cr3t@i", "lost nats://h:1, http://i"),
        ("--x=http://u:s3cr3t@h/a@b", "--x=http://h/a@b"),
        ("mail a@b, see http://h/a@b", "mail a@b, see http://h/a@b"),
    ],
)
def test_a_line_without_the_logins_in_it(given: str, shown: str) -> None:
    assert redact.text(given) == shown


def test_a_long_line_takes_a_time_that_grows_with_its_length() -> None:
    """Request lines are logged. Whoever sends a long one would stop the process."""

    def seconds(length: int) -> float:
        took = []
        for _ in range(5):
            begin = time.process_time()
            redact.text("GET /?" + "a" * length + "@ HTTP/1.1")
            took.append(time.process_time() - begin)
        return max(min(took), 1e-5)

    assert seconds(50_000) < 40 * seconds(5_000), "ten times as long"


@given(before=st.text(max_size=9), after=st.text(max_size=9))
def test_no_password_is_left_whatever_is_in_it(before: str, after: str) -> None:
    for url in (f"http://u:{before}{SECRET}{after}@h:1", f"{before}{SECRET}{after}@h:1"):
        assert SECRET not in redact.url(url)
