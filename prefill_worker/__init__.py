"""Pulls, claims, reads the hit prefix, computes, writes, settles."""
