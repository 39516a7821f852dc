"""Connectors: what decides which KV is loaded and saved."""
