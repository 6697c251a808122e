"""The wall-time driver: pumps the controller with worker processes for executors."""
