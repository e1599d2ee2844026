"""What the parts of a job speak of: orders, status, and what a checkpoint says. Plain data."""
