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
       set_config('tcp_keepalives_count', '2', false), set_config('tcp_user_timeout', '3000', false),
       (select set_config(s.name, '0', false) from pg_settings s where s.name = 'transaction_timeout')  -- from 17 on

-- name: migrate_lock
select pg_advisory_xact_lock(hashtext('holdfast.migrate'))

-- name: migrate_busy
select not pg_try_advisory_xact_lock(hashtext('holdfast.migrate')) as busy

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

-- name: lease_force_release_if
select holdfast.lease_force_release_if(:name, :fence::bigint, :actor, :reason) as done

-- name: lease_recall
select holdfast.lease_recall(:name, :fence::bigint) as done

-- name: lease_clear
select holdfast.lease_clear(:name) as done

-- name: lease_wipe
select holdfast.lease_wipe(:name, :token::uuid, :keep::jsonb) as ended

-- name: slot_claim
select name, status, token, beat, fence, held_by, remaining, null as session_watch from holdfast.slot_claim(
    :pool, :capacity::int, :holder, :ttl::double precision, :token::uuid, :beat::uuid, :solo::boolean, :process::jsonb)

-- name: slot_list
select name, slot, holder, fence, remaining from holdfast.slot_list(:pool)

-- name: slot_abandon
select holdfast.slot_abandon(:name, :token::uuid, true) as done

-- name: slot_release
select holdfast.slot_abandon(:name, :token::uuid, false) as done

-- name: shard_list
select name, holder, remaining from holdfast.shard_list(:shards)

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

-- name: beat_wanted
select token from holdfast.beat_wanted(:beat::uuid)

-- name: beat_end
select holdfast.beat_end(:beat::uuid) as ended

-- name: purge
select holdfast.purge() as ended

-- name: listen
listen "holdfast.free"

-- name: wait_begin
-- All names in one go. Refused means that somebody is releasing that one this very moment.
select name, pg_try_advisory_lock_shared(hashtext('holdfast.free'), hashtext(name)) as done
  from json_array_elements_text(:names::json) as name

-- name: wait_end
select count(pg_advisory_unlock_shared(hashtext('holdfast.free'), hashtext(name))) as done
  from json_array_elements_text(:names::json) as name

-- name: session_hold
select pg_try_advisory_lock(:session_key::bigint) as done

-- name: session_free
-- Does no session hold it? Leaves nothing, in whichever session this is.
select pg_try_advisory_xact_lock(:session_key::bigint) as done

-- name: wait_long
-- Not for ever: as long as a statement waits, vacuum removes nothing that has died since it began. Then it is begun anew.
select set_config('statement_timeout', '0', false), set_config('lock_timeout', '10min', false)

-- name: vigil
-- Answered when the session that holds the key is gone.
select pg_advisory_lock_shared(:session_key::bigint)

-- name: lock_tune
-- A session that waits for a lock waits until it is told not to, as long at a time as with wait_long; unlocking what is not
-- locked is no reason to warn.
select set_config('statement_timeout', '0', false), set_config('lock_timeout', '10min', false), set_config('client_min_messages', 'error', false)

-- name: lock_room
-- How many locks more the server's table takes before it is half full: when it is full, nobody can even connect.
select current_setting('max_locks_per_transaction')::bigint
       * (current_setting('max_connections')::bigint + current_setting('max_prepared_transactions')::bigint) / 2
       - (select count(*) from pg_locks where not fastpath and mode <> 'SIReadLock') as room

-- name: lock_try
select pg_try_advisory_lock(:first::bigint) as done

-- name: lock_try_pair
select pg_try_advisory_lock(:first::int, :second::int) as done

-- name: lock_unlock
select pg_advisory_unlock(:first::bigint) as done

-- name: lock_unlock_pair
select pg_advisory_unlock(:first::int, :second::int) as done

-- name: lock_batch
-- In this order, each on its own: an error undoes nothing of what came before it.
select case verb when 0 then pg_try_advisory_lock(first) when 1 then pg_try_advisory_lock(first::int, second)
                 when 2 then pg_advisory_unlock(first) when 3 then pg_advisory_unlock(first::int, second)
                 else pg_cancel_backend(first::int) end as done
  from unnest(:verbs::int[], :firsts::bigint[], :seconds::int[]) as op (verb, first, second)

-- name: lock_wait
select pg_advisory_lock(:first::bigint)

-- name: lock_wait_pair
select pg_advisory_lock(:first::int, :second::int)

-- name: lock_namespace
select holdfast.lock_namespace(:name) as id

-- name: lock_remember
-- In a session that holds locks: it waits neither for whoever has locked the table, nor for the disk or a standby.
select holdfast.lock_remember(:names::jsonb) as written
  from (select set_config('lock_timeout', '100', true), set_config('synchronous_commit', 'off', true)) as hurried

-- name: lock_list
-- Taken by anybody. What may be seen of another role's session is the server's to say. The server does not keep when a
-- lock was granted: the session's last statement is the latest that it can have been.
select l.pid, a.application_name, a.state, extract(epoch from a.query_start)::double precision as query_start,
       n.namespace, n.entity_id, n.name, case l.mode when 'ShareLock' then 'shared' else 'exclusive' end as mode, l.granted,
       extract(epoch from clock_timestamp() - coalesce(l.waitstart, a.query_start))::double precision as duration,
       case when l.granted then '[]' else to_json(pg_blocking_pids(l.pid))::text end as blocked_by
  from pg_locks l left join pg_stat_activity a on a.pid = l.pid
       cross join lateral holdfast.lock_label(l.classid, l.objid, l.objsubid) n
 where l.locktype = 'advisory' and l.database = (select oid from pg_database where datname = current_database())
 order by l.granted desc, l.waitstart, l.pid

-- name: lock_break
select holdfast.lock_break(:pid::int) as outcome

-- name: audit_note
select holdfast.audit_note(:entry::bigint, :fence::bigint, :detail::jsonb) as done

-- name: audit_list
select id, at, actor, role, action, subject, reason, fence, detail, outcome, ended_at from holdfast.audit_list(:most::int)

-- name: audit_begin
select holdfast.audit_begin(:action, :subject, :actor, :reason, :detail::jsonb) as entry

-- name: audit_end
select holdfast.audit_end(:entry::bigint, :outcome) as done

-- name: protect
select holdfast.lease_protect(:name, cast(:token as uuid)) as fence

-- name: protect_at_commit
select holdfast.lease_protect_at_commit(:name, cast(:token as uuid)) as fence

-- name: object_put
-- Casts are written out, and of types that every driver knows: it also runs in the user's own transaction. Its row is taken
-- apart here: in the place of a table, a function's rows are put into a store first.
select (r).status, (r).version, (r).created_at, (r).updated_at, (r).name, (r).labels, (r).current, (r).owner from (select holdfast.object_put(
    cast(:type as text), cast(:id as text), cast(:body as text), cast(:raw as text), cast(:condition as text), cast(:expected as bigint),
    cast(:rename as boolean), cast(:name as text), cast(:labels as text), cast(cast(:token as text) as uuid), cast(:again as boolean),
    cast(:lease as text), cast(cast(:lease_token as text) as uuid), cast(:late as boolean)) as r) as put

-- name: object_swap
select (r).status, (r).version, (r).created_at, (r).updated_at, (r).name, (r).labels, (r).current from (select holdfast.object_swap(
    :type, :id, :body, :expected::bigint, :token::uuid, :again::boolean) as r) as swap

-- name: object_put_many
select id, version from holdfast.object_put_many(:type, :records::json, :lease, :lease_token::uuid)

-- name: object_delete
select status, current from holdfast.object_delete(
    cast(:type as text), cast(:id as text), cast(:expected as bigint), cast(cast(:token as text) as uuid), cast(:again as boolean),
    cast(:lease as text), cast(cast(:lease_token as text) as uuid), cast(:late as boolean))

-- name: object_get
select name, body, raw, labels, version, created_at, updated_at from holdfast.object_get(:type, :id)

-- name: object_get_by_name
select id, body, raw, labels, version, created_at, updated_at from holdfast.object_get_by_name(:type, :name)

-- name: object_list
select id, name, body, raw, labels, version, created_at, updated_at from holdfast.object_list(:type, :labels::jsonb, :after, :most::int)

-- name: object_cursor
select cursor, version, extract(epoch from clock_timestamp())::double precision as now from holdfast.object_cursor()

-- name: object_changes
select snapshot, place, version, type, id, kind, expired from holdfast.object_changes(
    :epoch::bigint, :since::pg_snapshot, :until::pg_snapshot, :after::bigint, :type, :most::int, :listening::boolean)

-- name: operation_get
select status, fingerprint, result, result_hash, error, attempt, fence, pointer, rollback, effect_started, failures, alive, expired, now from holdfast.operation_get(:key)

-- name: operation_begin
-- This and operation_end also run in the user's own transaction, hence the casts.
select holdfast.operation_begin(cast(:key as text), cast(:lock as bigint), cast(:lease as text)) as answer

-- name: operation_write
select holdfast.operation_write(
    :key, :expected, :pointer, :number::int, :entries, :status, :attempt::int, :fence::bigint, :fingerprint, :result, :result_hash, :error,
    :keep::double precision, :effect_started::boolean, :failures::int, :rollback, :owner, :token::uuid, :lock::bigint, :outbox, :label, :pipeline,
    :task, :dataset, :operation, :checksum, :params_hash) as state

-- name: operation_end
select holdfast.operation_end(cast(:told as text)) as state

-- name: operation_claim_many
select state, key, status, fingerprint, result, result_hash, error, attempt, fenced as fence, pointer, handler as rollback, effect_started, failures, alive,
       expired, extract(epoch from clock_timestamp())::double precision as now
  from holdfast.operation_claim_many(
    :keys, :pointers, :entries, :labels, :fingerprints, :pipelines, :tasks, :datasets, :operations, :checksums, :params_hashes, :fence::bigint, :rollback, :owner, :token::uuid, :lock::bigint)

-- name: operation_finish_many
select key, null as state from holdfast.operation_finish_many(
    :keys, :expected, :pointers, :numbers, :entries, :statuses, :results, :result_hashes, :errors, :failures, :effects_started, :outboxes, :keep::double precision, :owner, :token::uuid)

-- name: operation_list
select key, label, status, alive, attempt, fence, pipeline, task, dataset, operation, result_hash, error, pointer, rollback, owner, effect_started, failures,
       created_at, updated_at, expires_at from holdfast.operation_list(:status, :dataset, :key, :most::int)

-- name: operation_entries
select number, entries from holdfast.operation_entries(:key, :after_number::int, :most::int)

-- name: operation_kin
-- This, and the two after it, also run in the user's own transaction, hence the casts.
select same, retry_of from holdfast.operation_kin(
    cast(:key as text), cast(:pipeline as text), cast(:task as text), cast(:dataset as text), cast(:operation as text), cast(:checksum as text),
    cast(:params_hash as text))

-- name: review_open
select holdfast.review_open(cast(:key as text), cast(:label as text), cast(:dataset as text), cast(:operation as text), cast(:reason as text), cast(:detail as text)) as id

-- name: review_take
select id, outcome, actor, answer from holdfast.review_take(cast(:key as text))

-- name: review_return
select holdfast.review_return(cast(:id as bigint)) as returned

-- name: review_list
select id, key, label, dataset, operation, reason, detail, opened_at, status, actor, answer, closed_at, spent_at
  from holdfast.review_list(:status, :id::bigint, :key, :most::int)

-- name: review_decide
select holdfast.review_decide(:id::bigint, :outcome, :actor, :answer) as decided

-- name: operation_failed
select holdfast.operation_failed(:dataset, :seconds::double precision) as failed

-- name: begin
begin

-- name: rollback
rollback

-- name: examine_role
-- What anybody may know about themselves, and about the schema, be it there or not.
select current_user::text as role, to_regnamespace(:schema) is not null as there,
       coalesce(has_schema_privilege(to_regnamespace(:schema)::oid, 'usage'), false) as usage,
       pg_has_role('pg_read_all_stats', 'usage') as sees_all

-- name: examine_settings
select name, setting, reset_val from pg_settings
 where name in ('autovacuum', 'client_connection_check_interval', 'idle_in_transaction_session_timeout', 'idle_session_timeout',
       'lock_timeout', 'max_connections', 'max_locks_per_transaction', 'max_prepared_transactions', 'reserved_connections',
       'statement_timeout', 'superuser_reserved_connections', 'synchronous_commit', 'synchronous_standby_names',
       'tcp_keepalives_count', 'tcp_keepalives_idle', 'tcp_keepalives_interval', 'tcp_user_timeout', 'transaction_timeout')

-- name: examine_clock
select extract(epoch from clock_timestamp())::double precision as now

-- name: examine_locks
-- Fast-path locks and predicate locks live elsewhere.
select count(*) as used from pg_locks where not fastpath and mode <> 'SIReadLock'

-- name: examine_connections
select (select sum(numbackends) from pg_stat_database)::int as used, s.numbackends as database_used,
       case when r.rolsuper then -1 else d.datconnlimit end as database_limit,
       (select count(*) from pg_stat_activity a where a.usesysid = r.oid) as role_used,
       case when r.rolsuper then -1 else r.rolconnlimit end as role_limit
  from pg_database d join pg_stat_database s on s.datid = d.oid join pg_roles r on r.rolname = session_user
 where d.datname = current_database()

-- name: examine_replicas
-- Whoever may not see the rest can still count them.
select count(*) as connected, count(*) filter (where sync_state in ('sync', 'quorum')) as synchronous from pg_stat_replication

-- name: examine_snapshots
-- What keeps vacuum from removing dead rows of this database. Of a session that is another role's only the pid is told.
select 'session ' || pid || coalesce(' (' || usename || coalesce(', ' || nullif(application_name, ''), '') || ')', '') as who,
       extract(epoch from clock_timestamp() - xact_start)::double precision as seconds,
       greatest(age(backend_xmin), age(backend_xid)) as transactions
  from pg_stat_activity
 where coalesce(backend_xmin, backend_xid) is not null and pid <> pg_backend_pid() and backend_type <> 'autovacuum worker'
   and (datname = current_database() or backend_type = 'walsender')
union all
select 'prepared transaction ' || quote_literal(gid), extract(epoch from clock_timestamp() - prepared)::double precision, age(transaction)
  from pg_prepared_xacts where database = current_database()
union all
select 'replication slot ' || quote_literal(slot_name), null, age(xmin) from pg_replication_slots where xmin is not null

-- name: examine_functions
select p.proname::text as name, bool_and(has_function_privilege(p.oid, 'execute')) as may from pg_proc p
 where p.pronamespace = to_regnamespace(:schema)::oid and p.proname = any (string_to_array(:names, ' ')) group by 1

-- name: examine_tables
select c.relname::text as name, pg_relation_size(c.oid) as bytes, coalesce(s.n_live_tup, 0) as live, coalesce(s.n_dead_tup, 0) as dead,
       extract(epoch from s.last_autovacuum)::double precision as vacuumed,
       (select string_agg(t.pubname, ', ' order by t.pubname) from pg_publication_tables t
         where t.schemaname = :schema and t.tablename = c.relname) as publications,
       c.relreplident in ('f', 'i')
       or c.relreplident = 'd' and exists (select from pg_index i where i.indrelid = c.oid and i.indisprimary)
       or not exists (select from pg_publication_tables t join pg_publication p on p.pubname = t.pubname
                       where t.schemaname = :schema and t.tablename = c.relname and (p.pubupdate or p.pubdelete)) as identified
  from pg_class c left join pg_stat_all_tables s on s.relid = c.oid
 where c.relnamespace = to_regnamespace(:schema)::oid and c.relkind = 'r' order by c.relname

-- name: wal_chains
select * from holdfast.wal_chains(array(select key from holdfast.wal_keys(:key, :since::double precision, :after, :most::int)))

-- name: wal_latest
select * from holdfast.wal_chains(array(select key from holdfast.wal_latest(:most::int)))

-- name: wal_find
select key from holdfast.wal_find(:hash)

-- name: wal_read
select epoch, horizon::text, place, key, entries from holdfast.wal_read(:epoch::bigint, :after_horizon::xid8, :after_place::bigint, :most::int)

-- name: wal_archive
select state from holdfast.wal_archive(:key, :expected, :pointer, :number::int, :entries)

-- name: review_close
select closed from holdfast.review_close(:key, :actor, :answer)

-- name: operation_expire
select gone from holdfast.operation_expire(:most::int)

-- name: operation_health
select * from holdfast.operation_health(:stale::double precision, :enough::int)

-- name: operation_indexes
select name from holdfast.operation_indexes()

-- name: relay_read
select horizon::text, place, key, number, entries, before, outbox, label, pipeline, task, dataset, operation, checksum, params_hash
  from holdfast.relay_read(:after_horizon::xid8, :after_place::bigint, :most::int)

-- name: relay_open
select 'done' as state, horizon::text, place, tries, taken, coalesce(lag, 0) as lag from holdfast.relay_open(:name, :lease, :token::uuid)

-- name: relay_begin
select 'begun' as state from holdfast.relay_begin(:name, :lease, :token::uuid, :tries)

-- name: relay_move
select case when moved then 'moved' else 'gone' end as state from holdfast.relay_move(
    :name, :lease, :token::uuid, :fence::bigint, :horizon::xid8, :place::bigint, :told::bigint, :ended, :parked, :freed, :problem, :tries, :taken)

-- name: relay_list
select name, told, fence, moved_at, problem, since, holder, parked, entries, lag, cursor from holdfast.relay_list()

-- name: relay_parked
select id, key, event, problem, tries, parked_at, again from holdfast.relay_parked(:name, :only_again::boolean, :most::int)

-- name: relay_retry
select asked from holdfast.relay_retry(:name, :id)

-- name: relay_remove
select removed from holdfast.relay_remove(:name)
