"""The key layout under `/pullfill/{namespace}/`.

Namespaces and instance ids hold no slash: they are checked where users give them
(`config.check_namespace`, `deploy/run_role.py`).
"""

from __future__ import annotations


def worker(namespace: str, role: str, instance_id: str) -> str:
    return record(namespace, "workers", f"{role}/{instance_id}")


def record(namespace: str, kind: str, name: str = "") -> str:
    """Key of a record of the kind `workers`, `config`, `adapters`, `self_checks` or `suspects`. Its
    name may hold anything. Without one: what all keys of the kind begin with."""
    return f"/pullfill/{namespace}/{kind}/{name}"
