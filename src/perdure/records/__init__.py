"""Facts: what happened, in the form that is stored for ever.

May live here: frozen msgspec structs and their codec. May not: judgement, time, I/O, anything an author types.
A record is never changed; a new shape is a new tag (``Name/2``) with a reader for the old one kept for ever.
"""
