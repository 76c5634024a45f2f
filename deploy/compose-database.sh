#!/bin/sh
# Creates the database, the role that owns its tables, and those that roles.sql grants to. The image runs it once, in an empty volume.
psql --set ON_ERROR_STOP=1 --set owner="$(cat "$HOLDFAST_OWNER_PASSWORD_FILE")" --set gateway="$(cat "$HOLDFAST_GATEWAY_PASSWORD_FILE")" \
    --no-psqlrc --dbname postgres <<'SQL'
create role holdfast login password :'owner';
create role worker;
create role operator in role worker;
create role gateway login password :'gateway' in role operator;
create database holdfast owner holdfast;
SQL
