"""Jobs on an engine that starts tasks: Kubernetes, Slurm, Ray, hosts by ssh."""
