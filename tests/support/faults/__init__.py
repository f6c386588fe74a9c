"""Faults and ill will against real nodes: ``chaos`` strikes in mid-answer by a seed and ``history`` judges what
clients saw, ``hostile`` sends valid requests that cost much, ``rogue`` is a paired machine that has turned. Use these
to show that others are served meanwhile.
"""
