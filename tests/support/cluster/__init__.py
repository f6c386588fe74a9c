"""Members of a cluster and what they tell each other: memberships in virtual time, worlds of trust, both sides of a
pairing, and for every message a receiver, valid messages to begin from and damaged ones. Use these when a test asks
what a machine believes of the others, or whether a message can harm it.
"""
