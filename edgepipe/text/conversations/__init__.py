"""Conversations as chat templates take them: what each template accepts, and the repairs for what it does not."""
