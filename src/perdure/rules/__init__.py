"""Pure judgement: legal transitions, fold, recovery, invariants.

May live here: functions and tables that take values and return a value naming what is so or what to do. May not: a
clock, I/O, ``await``, chance. Everything here can be tested with literals.
"""
