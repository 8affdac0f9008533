"""Moves KV blocks between registered memories; proves when no byte can land any more."""
