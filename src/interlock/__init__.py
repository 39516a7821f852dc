"""Interlock: an LLM inference runtime whose steps never read KV that has not landed."""
