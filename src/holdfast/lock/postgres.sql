-- name: lock_tune
-- A wait ends after lock_timeout, and is then repeated. To unlock what is not locked causes no warning.
select set_config('statement_timeout', '0', false), set_config('lock_timeout', '10min', false), set_config('client_min_messages', 'error', false)

-- name: lock_room
-- How many locks more the server's table takes before it is half full: when it is full, no client can connect.
select current_setting('max_locks_per_transaction')::bigint
       * (current_setting('max_connections')::bigint + current_setting('max_prepared_transactions')::bigint) / 2
       - (select count(*) from pg_locks where not fastpath and mode <> 'SIReadLock') as room

-- name: lock_try
select pg_try_advisory_lock(:first::bigint) as done

-- name: lock_try_pair
select pg_try_advisory_lock(:first::int, :second::int) as done

-- name: lock_try_shared
select pg_try_advisory_lock_shared(:first::bigint) as done

-- name: lock_try_shared_pair
select pg_try_advisory_lock_shared(:first::int, :second::int) as done

-- name: lock_unlock
select pg_advisory_unlock(:first::bigint) as done

-- name: lock_unlock_pair
select pg_advisory_unlock(:first::int, :second::int) as done

-- name: lock_unlock_shared
select pg_advisory_unlock_shared(:first::bigint) as done

-- name: lock_unlock_shared_pair
select pg_advisory_unlock_shared(:first::int, :second::int) as done

-- name: lock_wait
select pg_advisory_lock(:first::bigint)

-- name: lock_wait_pair
select pg_advisory_lock(:first::int, :second::int)

-- name: lock_wait_shared
select pg_advisory_lock_shared(:first::bigint)

-- name: lock_wait_shared_pair
select pg_advisory_lock_shared(:first::int, :second::int)

-- name: lock_batch
-- In this order, each by itself: an error undoes nothing of what came before it.
select case op
            when 0 then pg_try_advisory_lock(first) when 1 then pg_try_advisory_lock(first::int, second)
            when 2 then pg_try_advisory_lock_shared(first) when 3 then pg_try_advisory_lock_shared(first::int, second)
            when 4 then pg_advisory_unlock(first) when 5 then pg_advisory_unlock(first::int, second)
            when 6 then pg_advisory_unlock_shared(first) when 7 then pg_advisory_unlock_shared(first::int, second)
            else pg_cancel_backend(first::int)
       end as done
  from unnest(:ops::int[], :firsts::bigint[], :seconds::int[]) as batch (op, first, second)

-- name: lock_rivals
-- Whether another session waits for a key.
select exists (select from pg_locks l
                where l.locktype = 'advisory' and l.database = (select oid from pg_database where datname = current_database())
                  and not l.granted and (l.objsubid = 2) = :pair::boolean
                  and l.classid::bigint << 32 | l.objid::bigint = :key::bigint) as done

-- name: lock_namespace
select holdfast.lock_namespace(:name) as id

-- name: lock_note
-- In a session that holds locks: it waits neither for a lock on the table, nor for the disk or a standby.
select holdfast.lock_note(:is_first::boolean, :names::jsonb, :held::jsonb, :gone::jsonb) as done
  from (select set_config('lock_timeout', '100', true), set_config('synchronous_commit', 'off', true)) as hurried

-- name: lock_list
-- All advisory locks of the database, or those with the given keys: [pair, key] each. What may be seen of another role's session is the server's to say.
-- The server does not keep when a lock was granted. Sessions of holdfast note it within a second; until then, and in sessions of
-- other programs, the last statement is the latest that it can have been.
with advisory as (
    select l.*, l.objsubid = 2 as pair, l.classid::bigint << 32 | l.objid::bigint as key
      from pg_locks l
     where l.locktype = 'advisory' and l.database = (select oid from pg_database where datname = current_database())
       and (:keys::jsonb is null or (l.objsubid = 2, l.classid::bigint << 32 | l.objid::bigint)
                                 in (select (each ->> 0)::boolean, (each ->> 1)::bigint from jsonb_array_elements(:keys::jsonb) each))
), holds as materialized (
    select * from holdfast.lock_holds()
), queues as (
    select pair, key, sum(length) as length
      from (select pair, key, 1 as length from advisory where not granted
             union all
            select h.pair, h.key, h.waiting from holds h
             where h.since is null
                or exists (select from advisory a where a.granted and a.pid = h.pid and a.pair = h.pair and a.key = h.key)) each
     group by pair, key
)
select l.pid, l.pair, l.key, a.application_name, a.usename::text as role, a.state, extract(epoch from a.query_start)::double precision as query_start,
       n.namespace, n.entity_id, n.name, case l.mode when 'ShareLock' then 'shared' else 'exclusive' end as mode, l.granted,
       extract(epoch from coalesce(h.since, o.since, case when l.granted and a.application_name like 'holdfast:%'
                                                               and a.query_start > clock_timestamp() - interval '1 second' then a.query_start end)
              )::double precision as held_since,
       extract(epoch from clock_timestamp() - coalesce(l.waitstart, h.since, o.since, a.query_start))::double precision as duration,
       coalesce(q.length, 0) as waiting,
       case when l.granted then '[]' else to_json(pg_blocking_pids(l.pid))::text end as blocked_by
  from advisory l left join pg_stat_activity a on a.pid = l.pid
       left join holds h on l.granted and h.pid = l.pid and h.pair = l.pair and h.key = l.key
       left join queues q on q.pair = l.pair and q.key = l.key
       cross join lateral holdfast.lock_label(l.classid, l.objid, l.objsubid) n
       -- What a transaction holds until its end, it has held at the earliest since it began.
       left join lateral (select a.xact_start as since where n.name like 'transaction under %' or n.name like 'acquire of %') o on l.granted
 order by l.granted desc, l.waitstart, l.pid

-- name: lock_end_session
select holdfast.lock_end_session(:pid::int, :entry::bigint) as outcome
