"""The read side for people: runs, threads, audit, obligations. Everything here can be thrown away and read again.

May live here: frozen views and pure reads over ``ports.store.Store``. May not: writes, waiting, anything that decides.
"""
