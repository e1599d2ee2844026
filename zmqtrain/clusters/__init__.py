"""Jobs on an engine that starts tasks: Kubernetes, Slurm."""
