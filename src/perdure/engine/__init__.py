"""The hands: admission, claims, attempts, effects, settlement, recovery. Facts and rules decide; the engine acts.

``admission`` is the only way to create owed work; ``effects`` is the only way to touch the world.
"""
