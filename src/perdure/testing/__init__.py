"""The public test kit: an outside witness, crashes, simulation and conformance. Nothing shipped imports it."""
