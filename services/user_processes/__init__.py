"""Processes that run the user's own code, so that what hangs or crashes takes nothing else with it."""
