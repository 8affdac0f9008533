"""The error tree: what can be retried, and how a process ends."""

from __future__ import annotations

import pytest

from pullfill import errors


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.ConfigError("x"), 2),
        (errors.IncompatibleError("x", field="dtype"), 2),
        (errors.NotNow("x"), 1),
        (errors.RegistryUnavailable("x"), 1),
        (errors.EngineStuck("x"), 1),
    ],
)
def test_only_what_no_new_start_can_mend_is_final(error: errors.PullfillError, code: int) -> None:
    assert errors.exit_code(error) == code
