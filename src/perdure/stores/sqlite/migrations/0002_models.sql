-- Migration 2: models, of which all processes on one database keep one rate; live events for other processes.

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
