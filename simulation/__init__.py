"""Clusters in virtual time, over a faulty network: thousands of schedules in little time.

The tasks are the real ones; the clock, the network and the deaths of processes are simulated.
Everything is drawn from one seed, so a schedule that fails can be replayed exactly. The kernel's
work for a dead process is imitated as on Linux, so simulations run only there.
"""
