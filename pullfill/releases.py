"""The releases of vLLM that pullfill is tested with.

`make install` reads this on a bare Python, so it imports nothing.
"""

# What `make install` installs.
VLLM = "0.32.0"

# PyTorch of each release of vLLM that passes `make test-vllm`. Others are refused.
TORCH = {"0.32.0": "2.13.0", "0.31.0": "2.13.0"}
