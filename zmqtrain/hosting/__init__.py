"""The only place where the actors of a process are made from a plan and run to their end."""
