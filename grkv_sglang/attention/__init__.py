"""Attention backends that read a request's KV from where its compressed prefix begins."""
