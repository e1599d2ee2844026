"""Clusters in virtual time, over a network that misbehaves: thousands of schedules in little time.

The tasks are the real ones. What is simulated is around them: the clock, the network, the death of
processes. Everything is drawn from one seed, so a schedule that fails can be replayed exactly. What
the kernel does for a process that dies is imitated as Linux does it, so it runs there alone.
"""
