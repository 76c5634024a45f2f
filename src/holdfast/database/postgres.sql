-- The statements that Python sends, here and in postgres.sql of every other noun. Parameters are written :name and become
-- $1, $2, … when the file is read; a parameter without a value is NULL.

-- name: session_open
-- What the caller must know of this session; session_tune overrides settings that a role or database default may change.
select pg_is_in_recovery() as in_recovery, pg_backend_pid() as pid, current_setting('server_version_num')::int as version,
       current_setting('transaction_read_only')::boolean as read_only

-- name: session_tune
select set_config('default_transaction_isolation', 'read committed', false),
       set_config('synchronous_commit',
                  case current_setting('synchronous_commit') when 'off' then 'on' else current_setting('synchronous_commit') end, false),
       set_config('statement_timeout', '30s', false), set_config('lock_timeout', '10s', false),
       set_config('idle_session_timeout', '0', false), set_config('client_connection_check_interval', '1s', false),
       set_config('tcp_keepalives_idle', '1', false), set_config('tcp_keepalives_interval', '1', false),
       set_config('tcp_keepalives_count', '2', false), set_config('tcp_user_timeout', '3000', false),
       (select set_config(s.name, '0', false) from pg_settings s where s.name = 'transaction_timeout')  -- since PostgreSQL 17

-- name: migrate_lock
select pg_advisory_xact_lock(hashtext('holdfast.migrate'))

-- name: migrate_busy
select not pg_try_advisory_xact_lock(hashtext('holdfast.migrate')) as busy

-- name: schema_applied
select version, name, extract(epoch from applied_at)::double precision as applied_at from holdfast.schema_version order by version

-- name: share
-- First in a transaction that several callers share: what waits for a row in it keeps all of them waiting. Less than the server's
-- deadlock_timeout, and more than a commit on a slow disk: NOTIFY waits for the commits of others.
select set_config('lock_timeout', '200ms', true)

-- name: hello
select holdfast.hello() as version

-- name: session_hold
select pg_try_advisory_lock(:session_key::bigint) as done

-- name: session_hold_shared
-- A session of this process that the server has not given up yet may have it, too.
select pg_try_advisory_lock_shared(:session_key::bigint) as done

-- name: session_free
-- Whether no session holds the key. The lock ends with this statement, in any session.
select pg_try_advisory_xact_lock(:session_key::bigint) as done

-- name: begin
begin

-- name: rollback
rollback
