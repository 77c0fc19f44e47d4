"""What authors type: agents, tools, policies, verdicts. Pure values; nothing here runs, stores or waits.

A definition is never needed to read a record.
"""
