"""The key layout under `/pullfill/{namespace}/`. Instance ids hold no slash."""

from __future__ import annotations

from pullfill.errors import ConfigError
from pullfill.ids import is_name

ROOT = "/pullfill"


def _checked(text: str, what: str) -> str:
    if not is_name(text):
        raise ConfigError(
            f"{what} {text!r} is not usable: lower-case letters, digits, '-', '_' only"
        )
    return text


def namespace_prefix(namespace: str) -> str:
    """`/pullfill/NS/`. Raises ConfigError for a namespace that is no name."""
    return f"{ROOT}/{_checked(namespace, 'namespace')}/"


def worker(namespace: str, role: str, instance_id: str) -> str:
    _checked(instance_id, "instance id")
    return record(namespace, "workers", f"{_checked(role, 'role')}/{instance_id}")


def record(namespace: str, kind: str, name: str = "") -> str:
    """Key of a record of the kind `workers`, `config`, `adapters`, `self_checks` or `suspects`. Its
    name may hold anything. Without one: what all keys of the kind begin with."""
    return f"{namespace_prefix(namespace)}{kind}/{name}"
