-- Migration 3: workflows: their plans, shared budgets, artifacts, long-term memory.

-- Compiled workflows by the digest of their bytes. A run names its plan; the same plan is stored once.
CREATE TABLE plan (
  digest TEXT PRIMARY KEY,
  body BLOB NOT NULL
) STRICT;

-- What the runs of one lineage reserved of the budget they share, and in the end used: one row a unit of each effect.
CREATE TABLE lineage_charge (
  lineage TEXT NOT NULL,
  unit TEXT NOT NULL,
  effect TEXT NOT NULL,
  amount INTEGER NOT NULL,
  PRIMARY KEY (lineage, unit, effect)
) STRICT, WITHOUT ROWID;
