"""The same workloads on other systems, each in an environment of its own."""
