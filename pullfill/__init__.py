"""pullfill: pull-based disaggregated prefill for stock vLLM.

This package holds the words every room shares (wire structs, errors, config,
clock, metrics). The rooms themselves are sub-packages; see docs/architecture.md.
"""

__version__ = "0.1.0"
