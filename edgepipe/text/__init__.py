"""Text to tokens and back: tokenizers, chat templates and their standard conversations, in children where it costs."""
