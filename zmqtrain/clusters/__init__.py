"""Jobs on an engine that starts tasks: Kubernetes, Slurm, hosts by ssh."""
