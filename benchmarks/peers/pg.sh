#!/bin/bash
# pg.sh start|stop|status : a PostgreSQL 15 of our own on 127.0.0.1:54399, default durability (fsync=on, synchronous_commit=on)
source "$(dirname "$0")/env.sh"
# the cluster lives where the postgres user can reach it; $DATA/pg is a link (benchlib.pg_pid reads it)
D=/var/lib/postgresql/perdure-bench
[ -e $DATA/pg ] || ln -sfn $D $DATA/pg
cd /
run() { setpriv --reuid=postgres --regid=postgres --clear-groups "$@"; }
case "$1" in
 start)
  if [ ! -f $D/PG_VERSION ]; then
    mkdir -p $D && chown postgres:postgres $D && chmod 700 $D
    run $PGBIN/initdb -D $D -A trust -U postgres --no-instructions >/dev/null
    printf "listen_addresses='127.0.0.1'\nport=$PGPORT\nmax_connections=200\nunix_socket_directories='$D'\nautovacuum=on\n" >> $D/postgresql.conf
    chown postgres:postgres $D/postgresql.conf
  fi
  run $PGBIN/pg_ctl -D $D -l $D/log -w start >/dev/null && $PGBIN/psql -h 127.0.0.1 -U postgres -Atc "select version(), current_setting('fsync'), current_setting('synchronous_commit'), current_setting('wal_sync_method')";;
 stop) run $PGBIN/pg_ctl -D $D -m fast -w stop >/dev/null;;
 status) run $PGBIN/pg_ctl -D $D status;;
esac
