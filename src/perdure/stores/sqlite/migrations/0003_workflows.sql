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

-- Files that tasks left, by digest; their bytes are beside the database. A lease keeps them until a task's end does.
CREATE TABLE artifact (
  digest TEXT PRIMARY KEY,
  size INTEGER NOT NULL,
  created_at INTEGER NOT NULL,
  verified_at INTEGER
) STRICT, WITHOUT ROWID;

CREATE TABLE artifact_ref (
  run TEXT NOT NULL,
  task TEXT NOT NULL,
  path TEXT NOT NULL,
  digest TEXT NOT NULL REFERENCES artifact (digest),
  name TEXT NOT NULL,
  media_type TEXT NOT NULL,
  PRIMARY KEY (run, task, path)
) STRICT, WITHOUT ROWID;
CREATE INDEX artifact_ref_digest ON artifact_ref (digest);

CREATE TABLE artifact_lease (
  run TEXT NOT NULL,
  task TEXT NOT NULL,
  digest TEXT NOT NULL REFERENCES artifact (digest),
  until INTEGER NOT NULL,
  PRIMARY KEY (run, task, digest)
) STRICT, WITHOUT ROWID;
CREATE INDEX artifact_lease_digest ON artifact_lease (digest);

-- Memory that outlives runs: one entry a key of a namespace, its text to search, its vector as little-endian float32.
CREATE TABLE memory (
  namespace TEXT NOT NULL,
  key TEXT NOT NULL,
  entry BLOB NOT NULL,
  text TEXT NOT NULL,
  vector BLOB NOT NULL,
  updated_at INTEGER NOT NULL,
  expires_at INTEGER,
  PRIMARY KEY (namespace, key)
) STRICT, WITHOUT ROWID;
CREATE INDEX memory_expires ON memory (expires_at) WHERE expires_at IS NOT NULL;

-- Payloads that are too large to stand in their batch, by their digest (records/blobs.py).
CREATE TABLE blob (
  thread INTEGER NOT NULL REFERENCES thread (number),
  digest TEXT NOT NULL,
  body BLOB NOT NULL,
  PRIMARY KEY (thread, digest)
) STRICT;
