-- Migration 2: models, of which all processes on one database keep one rate.

-- How far ahead the calls of a model are counted by all processes together, and until when its provider asked to wait.
CREATE TABLE model (
  name TEXT PRIMARY KEY,
  requests_at INTEGER NOT NULL,
  tokens_at INTEGER NOT NULL,
  held_until INTEGER NOT NULL
) STRICT, WITHOUT ROWID;
