"""One plan from a job and a cluster: shards, layouts, exchange, copies, hosts, policy. Pure."""
