"""OpenAI's chat completions and completions, whose bodies (``gateway/schema.py``) are the common form of all."""
