"""Connectors of stock vLLM for tests."""

from __future__ import annotations

from typing import Any

from pullfill.worker.stock_core import PullfillDecode


class FailsLate(PullfillDecode):
    """vLLM fails after the worker has joined its cluster, and before it is up."""

    def set_xfer_handshake_metadata_pp_aware(self, metadata: Any) -> None:
        super().set_xfer_handshake_metadata_pp_aware(metadata)
        raise RuntimeError("vLLM cannot go on")
