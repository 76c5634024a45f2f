-- The statements that Python sends, here and in postgres.sql of every other noun. Parameters are written :name and become
-- $1, $2, … when the file is read; a parameter without a value is NULL.

-- name: session_open
-- What the caller must know of this session.
select pg_is_in_recovery() as in_recovery, pg_backend_pid() as pid, current_setting('server_version_num')::int as version,
       current_setting('transaction_read_only')::boolean as read_only

-- name: session_tune
-- Overrides settings that a role or database default may change. It returns what identifies this session, for session_end: its
-- pid can be another one's after its end.
select pg_backend_pid() as pid, (select (extract(epoch from a.backend_start) * 1000000)::bigint from pg_stat_activity a where a.pid = pg_backend_pid()) as started,
       (extract(epoch from pg_postmaster_start_time()) * 1000000)::bigint as server,
       set_config('default_transaction_isolation', 'read committed', false),
       set_config('synchronous_commit',
                  case current_setting('synchronous_commit') when 'off' then 'on' else current_setting('synchronous_commit') end, false),
       set_config('statement_timeout', '30s', false), set_config('lock_timeout', '10s', false),
       set_config('idle_session_timeout', '0', false), set_config('client_connection_check_interval', '1s', false),
       set_config('tcp_keepalives_idle', '1', false), set_config('tcp_keepalives_interval', '1', false),
       set_config('tcp_keepalives_count', '2', false), set_config('tcp_user_timeout', '3000', false),
       (select set_config(s.name, '0', false) from pg_settings s where s.name = 'transaction_timeout')  -- since PostgreSQL 17

-- name: session_end
-- End another session of this role, wait for its end for :patience milliseconds, and return whether it has ended. A server that
-- was started later has none of its sessions; one that was promoted gets none of their commits. A session whose start is hidden
-- belongs to another role. Without the setting, a session that ends by itself meanwhile would cause a warning, which means doubt.
select coalesce((
    select case when a.backend_start is null then false
                when (extract(epoch from a.backend_start) * 1000000)::bigint = :started::bigint then pg_terminate_backend(a.pid, :patience::bigint)
                else true end
      from pg_stat_activity a
     where a.pid = :pid::int and (extract(epoch from pg_postmaster_start_time()) * 1000000)::bigint = :server::bigint
       and set_config('client_min_messages', 'error', true) = 'error'), true) as done

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
select version, sql_version from holdfast.hello()

-- name: session_hold
select pg_try_advisory_lock(:session_key::bigint) as done

-- name: session_hold_shared
select holdfast.owner_hold(:session_key::bigint) as done

-- name: session_free
-- Whether no session holds the key. The lock ends with this statement, in any session.
select pg_try_advisory_xact_lock(:session_key::bigint) as done

-- name: session_release
select pg_advisory_unlock(:session_key::bigint) as done

-- name: begin
begin

-- name: rollback
rollback
