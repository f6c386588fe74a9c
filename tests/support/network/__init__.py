"""Connections that a test can harm. The LAN lab (``lan``) gives hosts network stacks of their own behind a switch
that delays, slows or loses frames; the rest stays on loopback or in memory: both ends of a hop, a proxy that cuts or
stalls, ends with any certificate, free ports. Use these for whatever depends on how messages travel.
"""
