"""What surrounds a pure core in a test: made-up machines, links and requests that answer its commands with events in
virtual time, and referees that find the best answer by trying all. One each for the planner, the scheduler and the
recovery. Use these for histories with a seed, thousands of events in a second.
"""
