"""Paceline side by side with other engines: each in its own environment and process, taking turns in one run."""
