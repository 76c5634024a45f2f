"""Agents: they report through hooks, which are handled one at a time an agent, whichever replica they come to.

lifecycle      PURE: what a hook does to an agent
upkeep         PURE: what the workers find wrong with one, and what is done about it
records        agents, commands and turns in the store; one commit for all that a hook does
correlate      whose hook it is: before the lock, and without one
desk           what a replica keeps of this in its own memory
hooks          POST /hook/{kind}, GET /hook/status, and stops that wait a while
workers        reaper, transcript reconciler, context poller, watchdog: a busy agent is left to the next cycle
transcript     what an agent wrote down itself
summaries      made once
inject         a prompt and skills, once an agent
config_editor  a file of settings, merged under its lock
routes         all of it as one room of the gateway
"""
