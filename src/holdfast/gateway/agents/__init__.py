"""Agents report through hooks. Hooks of one agent are handled one after the other, whichever replica they reach.

lifecycle      PURE: what a hook does to an agent
worker_rules   PURE: what the workers repair, and how
records        agents, commands and turns in the store; one commit for everything that a hook changes
correlation    which agent a hook belongs to; decided before the lock, by compare-and-swap
replica_state  counters and pending stops of this replica, in memory
hooks          POST /hook/{kind}, GET /hook/status, and stops that are completed after a delay
workers        reaper, transcript reconciler, context poller, watchdog; a locked agent waits for the next cycle
transcript     the file of JSON lines that an agent writes itself
summaries      the summary of a command, made once
injection      a prompt and skills, once per agent
config_editor  a file of settings, edited under its lock
routes         all other routes of agents
"""
