"""zmqtrain: a parameter-server training engine."""

__version__ = "0.1.0"
