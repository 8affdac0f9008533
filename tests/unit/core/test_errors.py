"""The error tree: what can be retried, and that the docstring draws all of it."""

from __future__ import annotations

import pytest

from pullfill import errors


def _subclasses(kind: type[BaseException]) -> set[type[BaseException]]:
    return {kind}.union(*(_subclasses(child) for child in kind.__subclasses__()))


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


def test_the_docstring_draws_the_whole_tree() -> None:
    assert errors.__doc__
    for kind in _subclasses(errors.PullfillError):
        if kind.__module__ == errors.__name__:
            assert kind.__name__ in errors.__doc__
