"""A gateway with its HTTP port (``server``) in front of an engine that answers from a script (``fake_engine``),
generated HTTP calls, and text: templates that refuse something, schemas that are costly to compile, random outputs of
grammars. Use these in tests of requests, conversations, tool calls and answers, which need no model.
"""
