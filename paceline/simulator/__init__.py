"""The virtual-time driver: pumps the controller that the runtime pumps, with a latency model for an executor."""
