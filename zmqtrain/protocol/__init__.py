"""Plain data that the parts of a job exchange: orders, status, content of a checkpoint."""
