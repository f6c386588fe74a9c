"""One user's hostile but valid requests, and the user beside whom they are sent."""
