"""Implementations of attention. Each accepts a request or says in one sentence why not; none imports another."""
