"""A worker that changes its role while it runs: its engine can decode and prefill."""
