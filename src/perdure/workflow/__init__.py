"""Workflows: documents compiled to plans, and plans carried out durably. Above agents, whose loop runs inside tasks."""
