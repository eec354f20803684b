"""The OpenAI-compatible HTTP server (docs/api.md)."""
