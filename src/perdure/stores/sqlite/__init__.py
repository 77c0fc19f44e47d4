"""SQLite through apsw: the embedded store. ``store`` opens it; ``schema.sql`` is the truth about its layout."""
