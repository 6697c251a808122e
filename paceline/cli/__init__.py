"""The command line: all wiring, no decisions."""
