"""Owns the request and its blocks; decides local or remote; grants, commits, revokes."""
