"""pullfill: pull-based disaggregated prefill for stock vLLM.

All rooms share its modules: config, options, errors, clock and ids. The rooms are its sub-packages.
docs/architecture.md lists them.
"""

__version__ = "0.1.0"
