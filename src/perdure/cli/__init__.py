"""The ``perdure`` command. A door: it sees the app and the projections, and decides nothing about work.

``main`` holds global options and the table of commands; each command's module is loaded when it is called.
"""
