"""The releases of vLLM that pullfill is tested with.

`make install` reads this on a bare Python, so it imports nothing.
"""

# What `make install` installs.
VLLM = "0.32.0"

# PyTorch of each release of vLLM that passes `make test-vllm`. Others are refused. 0.33.0 is not
# built for CPUs: its Python files have passed, beside the compiled files of 0.32.0.
TORCH = {"0.33.0": "2.14.0", "0.32.0": "2.13.0", "0.31.0": "2.13.0"}
