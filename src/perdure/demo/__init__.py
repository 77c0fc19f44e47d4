"""The demonstration that ``perdure demo`` runs: a program on top of the public API, and the outside world it meets."""
