"""Connectors of stock vLLM for tests."""

from __future__ import annotations

from typing import Any, ClassVar

from pullfill.worker.stock_core import PullfillDecode


class ProbedConnector(PullfillDecode):
    """With a test's side (tests/contract/test_ports.py)."""

    role_class: ClassVar = ("tests.contract.test_ports", "ProbeRole")


class FailsLate(PullfillDecode):
    """vLLM fails after the worker has joined its cluster, and before it is up."""

    def set_xfer_handshake_metadata_pp_aware(self, metadata: Any) -> None:
        super().set_xfer_handshake_metadata_pp_aware(metadata)
        raise RuntimeError("vLLM cannot go on")
