"""Transports in which a thread of the owner moves the bytes: one protocol, several backends."""
