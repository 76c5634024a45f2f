-- name: lease_acquire
select status, fence, held_by, remaining, session_watch from holdfast.lease_acquire(
    :name, :holder, :ttl::double precision, :token::uuid, :beat::uuid, :reenter, :at_least::double precision,
    :solo::boolean, :session_key::bigint, :process::jsonb)

-- name: lease_renew
select holdfast.lease_renew(:name, :token::uuid) as done

-- name: lease_status
select holder, fence, ttl, remaining from holdfast.lease_status(:name, :token::uuid)

-- name: lease_release
select holdfast.lease_release(:name, null, :token::uuid, false, coalesce(:tell::boolean, false)) as done

-- name: lease_abandon
select holdfast.lease_abandon(:name, :token::uuid) as done

-- name: lease_force_release
select holdfast.lease_force_release(:name, :actor, :reason, false) as done

-- name: lease_force_release_if
select holdfast.lease_force_release_if(:name, :fence::bigint, :actor, :reason) as done

-- name: lease_recall
select holdfast.lease_recall(:name, :fence::bigint, :actor, :reason) as done

-- name: lease_clear
select holdfast.lease_clear(:name) as done

-- name: lease_wipe
select holdfast.lease_wipe(:name, :token::uuid, :prefix) as ended

-- name: lease_list
select name, kind, holder, fence, acquired_at, expires_at, remaining, host, pid, info, waiting from holdfast.lease_list(:name)

-- name: lease_history
select name, holder, role, host, pid, fence, acquired_at, ended_at, outcome, actor, reason from holdfast.lease_history(:name, :limit::int)

-- name: lease_activity
select bucket, kind, value from holdfast.lease_activity(:step::double precision, :buckets::int)

-- name: probe_expire
-- Longer than the shortest TTL. On SQLite, where a sleeping writer would block all others, expires_at is set back instead.
select pg_sleep(0.06)

-- name: beat_renew
select generation from holdfast.beat_renew(:beat::uuid)

-- name: beat_leases
select name, fence from holdfast.beat_leases(:beat::uuid)

-- name: beat_release
select holdfast.beat_release(:beat::uuid, :name, :fence::bigint) as done

-- name: beat_wanted
select fence from holdfast.beat_wanted(:beat::uuid)

-- name: beat_end
select holdfast.beat_end(:beat::uuid) as ended

-- name: purge
select holdfast.purge() as ended

-- name: listen
listen "holdfast.free"

-- name: wait_begin
-- All names in one statement. False: a release of that name is in progress.
select name, pg_try_advisory_lock_shared(hashtext('holdfast.free'), hashtext(name)) as done
  from json_array_elements_text(:names::json) as name

-- name: wait_end
select count(pg_advisory_unlock_shared(hashtext('holdfast.free'), hashtext(name))) as done
  from json_array_elements_text(:names::json) as name

-- name: wait_long
-- Not without a limit: while a statement waits, vacuum cannot remove rows that died since it began. The caller repeats it.
select set_config('statement_timeout', '0', false), set_config('lock_timeout', '10min', false)

-- name: vigil
-- Returns when the session that holds the key has ended.
select pg_advisory_lock_shared(:session_key::bigint)

-- name: protect
select holdfast.lease_protect(:name, cast(:token as uuid)) as fence

-- name: protect_at_commit
select holdfast.lease_protect_at_commit(:name, cast(:token as uuid)) as fence

-- name: protect_transaction
-- What a proof is derived for. A number, so that the user's transaction has its own from now on.
select cast(pg_current_xact_id() as text) as id

-- name: protect_proven
select holdfast.lease_protect_proven(:name, :proof, false) as fence

-- name: protect_at_commit_proven
select holdfast.lease_protect_proven(:name, :proof, true) as fence

-- name: fence_raise
select holdfast.fence_raise(:above::bigint, :entry::bigint) as fence
