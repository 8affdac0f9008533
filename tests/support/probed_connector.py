"""The connector of stock vLLM with a test's side (tests/contract/test_ports.py)."""

from __future__ import annotations

from typing import ClassVar

from pullfill.worker.stock_core import PullfillDecode


class ProbedConnector(PullfillDecode):
    """See the module."""

    role_class: ClassVar = ("tests.contract.test_ports", "ProbeRole")
