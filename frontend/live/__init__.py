"""The live page: its routes and snapshots, its history, its rows."""
