"""The page: its files, and the events that it draws."""
