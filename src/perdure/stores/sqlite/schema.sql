-- The whole database, format 3. This file is the truth; the numbered migrations must arrive at it.
-- Instants are microseconds since 1970. A thread is named by its number inside the database and by its id outside.

CREATE TABLE meta (
  key TEXT PRIMARY KEY,
  value TEXT NOT NULL
) STRICT, WITHOUT ROWID;

-- One row a thread: its fence (epoch, token), its lease, and when somebody should look at it next.
CREATE TABLE thread (
  number INTEGER PRIMARY KEY,
  id TEXT NOT NULL UNIQUE,
  created_at INTEGER NOT NULL,
  positions INTEGER NOT NULL DEFAULT 0,   -- queue positions given out
  epoch INTEGER NOT NULL DEFAULT 0,
  token INTEGER,
  owner TEXT,
  lease_until INTEGER,
  due_at INTEGER,
  due_program TEXT,                       -- null: any worker may (only intents to take in)
  blocked INTEGER NOT NULL DEFAULT 0,
  archived_at INTEGER
) STRICT;
CREATE INDEX thread_due ON thread (due_at) WHERE due_at IS NOT NULL AND blocked = 0;
CREATE INDEX thread_owner ON thread (owner) WHERE owner IS NOT NULL;

-- The log. A batch's identity is its place; tail = SHA-256(previous tail, body).
CREATE TABLE batch (
  thread INTEGER NOT NULL,
  first INTEGER NOT NULL,
  last INTEGER NOT NULL,
  epoch INTEGER NOT NULL,
  tail BLOB NOT NULL,
  body BLOB NOT NULL,
  PRIMARY KEY (thread, first)
) STRICT, WITHOUT ROWID;

-- The ledger: what is owed.
CREATE TABLE submission (
  number INTEGER PRIMARY KEY,
  id TEXT NOT NULL UNIQUE,
  thread INTEGER NOT NULL REFERENCES thread (number),
  position INTEGER NOT NULL,
  principal TEXT NOT NULL,
  key TEXT,
  program TEXT NOT NULL,
  definition TEXT NOT NULL,
  input BLOB NOT NULL,
  input_digest TEXT NOT NULL,
  state TEXT NOT NULL,
  created_at INTEGER NOT NULL,
  input_sequence INTEGER,
  wake_at INTEGER,
  not_before INTEGER NOT NULL DEFAULT 0,
  attempts INTEGER NOT NULL DEFAULT 0,
  attempt_tail INTEGER NOT NULL DEFAULT -1,
  outcome TEXT,
  failure BLOB,
  disposition TEXT,
  settled_at INTEGER,
  UNIQUE (thread, position)
) STRICT;
CREATE UNIQUE INDEX submission_key ON submission (thread, principal, key) WHERE key IS NOT NULL;
CREATE INDEX submission_open ON submission (thread, position) WHERE state <> 'settled';

-- Commands on their way into a log: immutable, first wins.
CREATE TABLE intent (
  number INTEGER PRIMARY KEY,
  thread INTEGER NOT NULL REFERENCES thread (number),
  submission TEXT,
  kind TEXT NOT NULL,
  subject TEXT NOT NULL,
  body BLOB NOT NULL,
  by TEXT NOT NULL,
  reason TEXT NOT NULL,
  at INTEGER NOT NULL,
  applied_at INTEGER,
  UNIQUE (kind, subject)
) STRICT;
CREATE INDEX intent_pending ON intent (thread) WHERE applied_at IS NULL;
CREATE INDEX intent_thread ON intent (thread);

-- Effects with a started record. What a row repeats of the log is compared by verify.
CREATE TABLE effect (
  id TEXT PRIMARY KEY,
  thread INTEGER NOT NULL,
  submission TEXT NOT NULL,
  run TEXT NOT NULL,
  call TEXT NOT NULL,
  step TEXT,
  operation TEXT NOT NULL,
  kind TEXT NOT NULL,
  effect_class TEXT NOT NULL,
  risk TEXT NOT NULL,
  key TEXT NOT NULL,
  business_key TEXT,
  status TEXT NOT NULL,
  verdict TEXT,
  tries INTEGER NOT NULL,
  sequence INTEGER NOT NULL,
  started_at INTEGER NOT NULL,
  ended_at INTEGER,
  next_probe_at INTEGER,
  held_by TEXT,                           -- worker in which a body of unknown outcome still runs
  held_until INTEGER                      -- no verdict is accepted before; that worker's renewals extend it
) STRICT, WITHOUT ROWID;
CREATE INDEX effect_run ON effect (run);
CREATE INDEX effect_unknown ON effect (thread) WHERE status = 'unknown';
CREATE UNIQUE INDEX effect_business ON effect (operation, business_key)
  WHERE business_key IS NOT NULL AND status IN ('started', 'unknown') AND verdict IS NULL;
CREATE INDEX effect_held ON effect (held_by) WHERE held_by IS NOT NULL;

CREATE TABLE approval (
  id TEXT PRIMARY KEY,
  thread INTEGER NOT NULL,
  submission TEXT NOT NULL,
  run TEXT NOT NULL,
  call TEXT NOT NULL,
  tool TEXT NOT NULL,
  arguments BLOB NOT NULL,
  digest TEXT NOT NULL,
  reason TEXT NOT NULL,
  asked_at INTEGER NOT NULL,
  status TEXT NOT NULL,
  by TEXT,
  decision_reason TEXT,
  decided_at INTEGER
) STRICT, WITHOUT ROWID;
CREATE INDEX approval_run ON approval (run);
CREATE INDEX approval_pending ON approval (thread) WHERE status = 'pending';

-- Threads that recovery could not read. Never settles work, never proves that an effect failed.
CREATE TABLE fault (
  thread INTEGER PRIMARY KEY REFERENCES thread (number),
  kind TEXT NOT NULL,
  message TEXT NOT NULL,
  first_at INTEGER NOT NULL,
  last_at INTEGER NOT NULL,
  tries INTEGER NOT NULL,
  next_at INTEGER NOT NULL
) STRICT;

-- How far ahead the calls of a model are counted by all processes together, and until when its provider asked to wait.
CREATE TABLE model (
  name TEXT PRIMARY KEY,
  requests_at INTEGER NOT NULL,
  tokens_at INTEGER NOT NULL,
  held_until INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

-- Who watches a submission from another process, and the live events left for them. Provisional; gone within a minute.
CREATE TABLE watcher (
  submission TEXT NOT NULL,
  watcher TEXT NOT NULL,
  until INTEGER NOT NULL,
  PRIMARY KEY (submission, watcher)
) STRICT, WITHOUT ROWID;

CREATE TABLE live (
  number INTEGER PRIMARY KEY AUTOINCREMENT,
  submission TEXT NOT NULL,
  producer TEXT NOT NULL,
  at INTEGER NOT NULL,
  body BLOB NOT NULL
) STRICT;
CREATE INDEX live_submission ON live (submission, number);
CREATE INDEX live_at ON live (at);

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
