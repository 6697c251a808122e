"""What became of requests, as figures."""
