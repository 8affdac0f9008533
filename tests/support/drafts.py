"""Speculation by n-grams. Answers of few tokens repeat themselves: some drafts are accepted."""

from __future__ import annotations

import json

FEW = (40, 90, 150)
NGRAM = {
    "method": "ngram", "num_speculative_tokens": 3,
    "prompt_lookup_max": 4, "prompt_lookup_min": 1,
}  # fmt: skip
SPECULATE = f"--speculative-config={json.dumps(NGRAM)}"
