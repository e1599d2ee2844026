"""How a job and a cluster become a plan: shards, layouts, exchange, copies, hosts, policy. Pure."""
