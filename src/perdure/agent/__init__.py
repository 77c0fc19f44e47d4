"""Agents: one interpreter behind ``run``, ``stream`` and the durable driver; its prompt, its batches, its context."""
