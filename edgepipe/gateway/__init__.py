"""OpenAI-compatible HTTP: requests and their logs, text, streaming. One gateway process per node."""
