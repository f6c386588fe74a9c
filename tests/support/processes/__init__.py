"""The program as its users run it: real nodes as processes, clients that hold every streamed token against the
oracle, commands with their output, a program on a real terminal, and waits with a deadline for what has no event. Use
these in end-to-end tests, and where a process must die.
"""
