-- The statements Python sends. Parameters are written :name and become $1, $2, … when the file is read; one that is not
-- given is NULL.

-- name: session_open
-- Settings a role or database default could spoil, and what the caller must know of this session.
select pg_is_in_recovery() as in_recovery, pg_backend_pid() as pid, current_setting('server_version_num')::int as version,
       current_setting('transaction_read_only')::boolean as read_only

-- name: session_tune
select set_config('default_transaction_isolation', 'read committed', false),
       set_config('synchronous_commit', case current_setting('synchronous_commit') when 'off' then 'on' else current_setting('synchronous_commit') end, false),
       set_config('statement_timeout', '30s', false), set_config('lock_timeout', '10s', false),
       set_config('idle_session_timeout', '0', false), set_config('client_connection_check_interval', '1s', false),
       set_config('tcp_keepalives_idle', '1', false), set_config('tcp_keepalives_interval', '1', false),
       set_config('tcp_keepalives_count', '2', false), set_config('tcp_user_timeout', '3000', false)

-- name: migrate_lock
select pg_advisory_xact_lock(hashtext('holdfast.migrate'))

-- name: schema_applied
select version, name, extract(epoch from applied_at)::double precision as applied_at from holdfast.schema_version order by version

-- name: hello
select holdfast.hello() as version

-- name: lease_acquire
select status, token, beat, fence, held_by, remaining, session_watch from holdfast.lease_acquire(
    :name, :holder, :ttl::double precision, :token::uuid, :beat::uuid, :reenter::boolean, :at_least::double precision,
    :solo::boolean, :session_key::bigint, :process::jsonb)

-- name: lease_renew
select holdfast.lease_renew(:name, :token::uuid) as done

-- name: lease_status
select holder, fence, ttl, remaining from holdfast.lease_status(:name, :token::uuid)

-- name: lease_release
select holdfast.lease_release(:name, :token::uuid, false, coalesce(:tell::boolean, false)) as done

-- name: lease_abandon
select holdfast.lease_abandon(:name, :token::uuid) as done

-- name: lease_force_release
select holdfast.lease_force_release(:name, :actor, :reason, false) as done

-- name: lease_list
select name, holder, fence, acquired_at, expires_at, remaining, host, pid, info from holdfast.lease_list(:name)

-- name: lease_history
select name, holder, host, pid, fence, acquired_at, ended_at, outcome, actor, reason from holdfast.lease_history(:name, :most::int)

-- name: probe_expire
-- Longer than the shortest TTL. On SQLite, where a transaction holds up every other, the time is set back instead.
select pg_sleep(0.06)

-- name: beat_renew
select generation from holdfast.beat_renew(:beat::uuid)

-- name: beat_leases
select token from holdfast.beat_leases(:beat::uuid)

-- name: beat_end
select holdfast.beat_end(:beat::uuid) as ended

-- name: purge
select holdfast.purge() as ended

-- name: listen
listen "holdfast.free"

-- name: wait_begin
select pg_try_advisory_lock_shared(hashtext('holdfast.free'), hashtext(:name)) as done

-- name: wait_end
select pg_advisory_unlock_shared(hashtext('holdfast.free'), hashtext(:name)) as done

-- name: session_hold
select pg_try_advisory_lock(:session_key::bigint) as done

-- name: wait_for_ever
select set_config('statement_timeout', '0', false), set_config('lock_timeout', '0', false)

-- name: vigil
-- Answered when the session that holds the key is gone.
select pg_advisory_lock_shared(:session_key::bigint)

-- name: protect
select holdfast.lease_protect(:name, cast(:token as uuid)) as fence

-- name: protect_at_commit
select holdfast.lease_protect_at_commit(:name, cast(:token as uuid)) as fence
