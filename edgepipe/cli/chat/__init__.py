"""``edgepipe chat``: the conversation, its terminal and its commands."""
