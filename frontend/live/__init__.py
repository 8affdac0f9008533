"""The live page: its routes and snapshots, its rows."""
