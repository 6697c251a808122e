"""Paceline: many language models on a few devices, each inside its latency goal."""

__version__ = "0.1.0"
