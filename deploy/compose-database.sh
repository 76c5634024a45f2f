#!/bin/sh
# Creates the role of the gateway, which is not a superuser, and its database. The image runs it once, in an empty volume.
psql --set ON_ERROR_STOP=1 --set password="$(cat "$HOLDFAST_PASSWORD_FILE")" --no-psqlrc --dbname postgres <<'SQL'
create role holdfast login password :'password';
create database holdfast owner holdfast;
SQL
