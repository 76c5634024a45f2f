-- The same names as in ../postgres/statements.sql. Here each is a short script, run in one BEGIN IMMEDIATE unless it only
-- reads. The first row a statement returns becomes parameters of the statements after it, the last one is the answer.
-- A statement under "-- stop" ends the script when it returns a row; leading ones are asked first without the write
-- lock, so that a refusal writes nothing and waits for nobody; one that writes and is the first is tried by itself before
-- there is a transaction. In the place of "-- as: name" stands all of that statement.
-- A commit waits for the disk, but for statements under "-- volatile": what they say ends with the machine, be it lost or not.
-- {now} is the machine's clock in seconds, and holdfast_gone(key) tells whether the kernel has freed the lock of a
-- session's process.

-- name: session_look
-- From here on this connection takes queries alone. Whoever only looks waits for nobody who writes.
pragma query_only = on;

-- name: schema_applied
select version, name, applied_at from holdfast_schema_version order by version;

-- name: hello
-- stop
select version from holdfast_schema_version where (select boot from holdfast_fence) = :boot order by version desc limit 1;
update holdfast_object_version set first = (((select last from holdfast_object_place) >> 28) + 1) << 28;
update holdfast_fence set last = ((last >> 32) + 1) << 32, boot = :boot;
select max(version) as version from holdfast_schema_version;

-- name: lease_acquire
-- volatile
-- stop
select 'acquired' as status, token, beat, fence, null as held_by, remaining, null as session_watch
  from holdfast_live where name = :name and token = :token;
-- stop
select 'held' as status, null as token, null as beat, null as fence, holder as held_by, remaining, session_key as session_watch
  from holdfast_live where name = :name and not (:reenter and holder = :holder and not kept) and not coalesce(holdfast_gone(session_key), 0);
-- stop
select 'beat_lost' as status, null as token, null as beat, null as fence, null as held_by, null as remaining, null as session_watch
 where :beat is not null and (:process_label is null or exists (select 1 from holdfast_beat where id = :beat))
   and not exists (select 1 from holdfast_beat where id = :beat and not dead and expires_at > {now} and not coalesce(holdfast_gone(session_key), 0));
select l.beat as old_beat, l.holder as old_holder,
       case when b.id = :beat then 'reentered'  -- alive by the step before, and the clock goes on between two steps
            when b.id is null or b.dead or b.expires_at <= {now} then 'expired'
            when coalesce(holdfast_gone(b.session_key), 0) then 'session_lost' else 'reentered' end as outcome
  from holdfast_lease l left join holdfast_beat b on b.id = l.beat where l.name = :name;
update holdfast_fence set last = last + 1 returning last as fence;
insert into holdfast_history (name, holder, host, pid, fence, acquired_at, ended_at, outcome)
select l.name, l.holder, b.host, b.pid, l.fence, l.acquired_at, min(coalesce(b.expires_at, {now}), {now}), :outcome
  from holdfast_lease l left join holdfast_beat b on b.id = l.beat where l.name = :name and not l.kept;
delete from holdfast_beat where id = :old_beat and solo;
update holdfast_beat set generation = generation + 1, dead = dead or :outcome <> 'reentered' where id = :old_beat;
select coalesce(:beat, lower(hex(randomblob(16)))) as beat_id;
insert into holdfast_beat (id, ttl, expires_at, solo, session_key, label, host, pid, started, info)
select :beat_id, :ttl, {now} + :ttl, :solo, :session_key, coalesce(:process_label, :holder), :process_host, :process_pid,
       coalesce(:process_started, {now}), :process_info where not exists (select 1 from holdfast_beat where id = :beat_id);
insert into holdfast_lease (name, holder, beat, token, fence, acquired_at, keep_until)
values (:name, :holder, :beat_id, :token, :fence, {now}, {now} + nullif(:at_least, 0))
    on conflict (name) do update set holder = excluded.holder, beat = excluded.beat, token = excluded.token, fence = excluded.fence,
       acquired_at = excluded.acquired_at, keep_until = excluded.keep_until, kept = 0;
select case when :outcome is null then 'acquired' when :outcome = 'reentered' then 'reentered' else 'taken_over' end as status,
       l.token, l.beat, l.fence, :old_holder as held_by, max(b.expires_at - {now}, 0.0) as remaining, null as session_watch
  from holdfast_lease l join holdfast_beat b on b.id = l.beat where l.name = :name and not b.dead;

-- name: lease_renew
-- volatile
-- The clock goes on between two statements: what has been renewed is for the update itself to say.
-- stop
select 0 as done where not exists (select 1 from holdfast_live where name = :name and token = :token);
update holdfast_beat set expires_at = {now} + ttl
 where id = (select beat from holdfast_live where name = :name and token = :token) returning 1 as renewed;
select coalesce(:renewed, 0) as done;

-- name: lease_status
select holder, fence, ttl, remaining from holdfast_live where name = :name and token = :token;

-- name: lease_release
-- volatile
-- stop
select 0 as done where not exists (select 1 from holdfast_lease where name = :name and token = :token);
select beat as old_beat, coalesce(keep_until > {now}, 0) as keeps from holdfast_lease where name = :name;
insert into holdfast_history (name, holder, host, pid, fence, acquired_at, ended_at, outcome)
select l.name, l.holder, b.host, b.pid, l.fence, l.acquired_at, {now}, 'released'
  from holdfast_lease l left join holdfast_beat b on b.id = l.beat where l.name = :name;
insert or replace into holdfast_beat (id, ttl, expires_at, solo, label, host, pid, started)
select 'kept:' || l.name, max(l.keep_until - {now}, 0.05), l.keep_until, 1, coalesce(b.label, l.holder), b.host, b.pid, coalesce(b.started, {now})
  from holdfast_lease l left join holdfast_beat b on b.id = l.beat where l.name = :name and :keeps;
update holdfast_lease set beat = 'kept:' || name, token = lower(hex(randomblob(16))), keep_until = null, kept = 1 where name = :name and :keeps;
delete from holdfast_lease where name = :name and not :keeps;
delete from holdfast_beat where id = :old_beat and solo;
update holdfast_beat set generation = generation + 1 where id = :old_beat and :tell;
select 1 as done;

-- name: lease_abandon
-- volatile
-- stop
select 0 as done where not exists (select 1 from holdfast_lease where name = :name and token = :token);
select beat as old_beat from holdfast_lease where name = :name;
insert into holdfast_history (name, holder, host, pid, fence, acquired_at, ended_at, outcome)
select l.name, l.holder, b.host, b.pid, l.fence, l.acquired_at, {now}, 'released'
  from holdfast_lease l left join holdfast_beat b on b.id = l.beat where l.name = :name;
delete from holdfast_lease where name = :name;
delete from holdfast_beat where id = :old_beat;
select 1 as done;

-- name: lease_force_release
-- stop
select 0 as done where not exists (select 1 from holdfast_lease where name = :name);
insert into holdfast_history (name, holder, host, pid, fence, acquired_at, ended_at, outcome, actor, reason)
select l.name, l.holder, b.host, b.pid, l.fence, l.acquired_at, {now}, 'forced', :actor, :reason
  from holdfast_lease l left join holdfast_beat b on b.id = l.beat where l.name = :name;
select beat as old_beat from holdfast_lease where name = :name;
update holdfast_beat set generation = generation + 1 where id = :old_beat;
delete from holdfast_beat where id = :old_beat and solo;
delete from holdfast_lease where name = :name;
select 1 as done;

-- name: lease_force_release_if
-- stop
select 0 as done where not exists (select 1 from holdfast_lease where name = :name and fence = :fence);
-- as: lease_force_release

-- name: lease_recall
-- stop
select 0 as done where not exists (select 1 from holdfast_live where name = :name and fence = :fence);
select beat as old_beat, token as old_token from holdfast_live where name = :name;
update holdfast_beat set generation = generation + 1, wanted = json_insert(coalesce(wanted, '[]'), '$[#]', :old_token) where id = :old_beat;
select 1 as done;

-- name: lease_clear
-- stop
select 0 as done where not exists (
    select 1 from holdfast_lease where name = :name and name not in (select v.name from holdfast_live v where v.name = :name));
-- as: purge
select 1 as done;

-- name: lease_wipe
-- stop
select null as ended where not exists (select 1 from holdfast_live where name = :name and token = :token);
select holder as by_holder from holdfast_live where name = :name;
insert into holdfast_history (name, holder, host, pid, fence, acquired_at, ended_at, outcome, actor, reason)
select l.name, l.holder, b.host, b.pid, l.fence, l.acquired_at, {now}, 'forced', :by_holder, 'wiped under guard ''' || :name || ''''
  from holdfast_lease l left join holdfast_beat b on b.id = l.beat
 where l.name <> :name and l.name not in (select value from json_each(coalesce(:keep, '[]'))) order by l.name;
update holdfast_beat set generation = generation + 1 where id in (
    select beat from holdfast_lease where name <> :name and name not in (select value from json_each(coalesce(:keep, '[]'))));
delete from holdfast_beat where solo and id in (
    select beat from holdfast_lease where name <> :name and name not in (select value from json_each(coalesce(:keep, '[]'))));
delete from holdfast_lease where name <> :name and name not in (select value from json_each(coalesce(:keep, '[]')));
select changes() as ended;

-- name: slot_claim
-- volatile
-- Like lease_acquire, once a slot is chosen. Held beyond the capacity, after it shrank, count as well.
-- stop
select name, 'acquired' as status, token, (select beat from holdfast_lease l where l.name = s.name) as beat, fence, null as held_by, remaining,
       null as session_watch from holdfast_slot s where pool = :pool and token = :token;
-- stop
select null as name, 'held' as status, null as token, null as beat, null as fence, min(holder) as held_by, min(remaining) as remaining,
       null as session_watch from holdfast_slot where pool = :pool having count(*) >= :capacity;
with recursive numbers (n) as (select 1 union all select n + 1 from numbers where n < :capacity)
select :pool || ':' || n as name from numbers where n not in (select slot from holdfast_slot where pool = :pool) order by n limit 1;
-- as: lease_acquire
select l.name, 'acquired' as status, l.token, l.beat, l.fence, null as held_by, max(b.expires_at - {now}, 0.0) as remaining, null as session_watch
  from holdfast_lease l join holdfast_beat b on b.id = l.beat where l.name = :name;

-- name: slot_list
select name, slot, holder, fence, remaining from holdfast_slot where pool = :pool order by slot;

-- name: slot_abandon
-- volatile
-- stop
select 0 as done where not exists (select 1 from holdfast_slot where pool = :name and token = :token);
select name from holdfast_slot where pool = :name and token = :token;
-- as: lease_abandon

-- name: slot_release
-- volatile
-- stop
select 0 as done where not exists (select 1 from holdfast_slot where pool = :name and token = :token);
select name from holdfast_slot where pool = :name and token = :token;
-- as: lease_release

-- name: shard_list
-- What begins so: "0" comes after "/".
select name, holder, remaining from holdfast_live
 where name > :shards || '/shard/' and name < :shards || '/shard0' or name > :shards || '/member/' and name < :shards || '/member0';

-- name: lease_list
select name, holder, fence, acquired_at, expires_at, remaining, host, pid, info from holdfast_live
 where :name is null or name = :name order by name;

-- name: lease_held
select holder, remaining from holdfast_live where name = :name and not coalesce(holdfast_gone(session_key), 0);

-- name: lease_history
select name, holder, host, pid, fence, acquired_at, ended_at, outcome, actor, reason from holdfast_history
 where :name is null or name = :name order by id desc limit :most;

-- name: probe_expire
-- Without waiting: a transaction here holds up every other.
update holdfast_beat set expires_at = {now} - 0.001 where id = (select beat from holdfast_lease where name = :name);

-- name: beat_renew
-- volatile
update holdfast_beat set expires_at = {now} + ttl where id = :beat and not dead and expires_at > {now} returning generation;

-- name: beat_leases
select token from holdfast_lease where beat = :beat;

-- name: beat_wanted
select value as token from holdfast_beat b, json_each(b.wanted) where b.id = :beat;

-- name: beat_end
-- volatile
insert into holdfast_history (name, holder, host, pid, fence, acquired_at, ended_at, outcome)
select l.name, l.holder, b.host, b.pid, l.fence, l.acquired_at, {now}, 'released'
  from holdfast_lease l left join holdfast_beat b on b.id = l.beat where l.beat = :beat;
insert or replace into holdfast_beat (id, ttl, expires_at, solo, label, host, pid, started)
select 'kept:' || l.name, max(l.keep_until - {now}, 0.05), l.keep_until, 1, coalesce(b.label, l.holder), b.host, b.pid, coalesce(b.started, {now})
  from holdfast_lease l left join holdfast_beat b on b.id = l.beat where l.beat = :beat and l.keep_until > {now};
update holdfast_lease set beat = 'kept:' || name, token = lower(hex(randomblob(16))), keep_until = null, kept = 1 where beat = :beat and keep_until > {now};
delete from holdfast_lease where beat = :beat;
delete from holdfast_beat where id = :beat;
select 0 as ended;

-- name: purge
-- volatile
update holdfast_beat set dead = 1 where not dead and expires_at <= {now};
insert into holdfast_history (name, holder, host, pid, fence, acquired_at, ended_at, outcome)
select l.name, l.holder, b.host, b.pid, l.fence, l.acquired_at, min(coalesce(b.expires_at, {now}), {now}), 'expired'
  from holdfast_lease l left join holdfast_beat b on b.id = l.beat where not l.kept and (b.id is null or b.dead);
delete from holdfast_lease where not exists (select 1 from holdfast_beat b where b.id = beat and not b.dead);
delete from holdfast_beat where dead;
delete from holdfast_history where id <= (select max(id) from holdfast_history) - 10000;
select 0 as ended;

-- name: lock_namespace
-- volatile
-- stop
select id from holdfast_lock_namespace where name = :name;
insert into holdfast_lock_namespace (name) values (:name) on conflict do nothing;
select id from holdfast_lock_namespace where name = :name;

-- name: lock_remember
-- volatile
insert into holdfast_lock_name (key, name, seen_at)
select json_extract(value, '$[0]'), json_extract(value, '$[1]'), {now} from json_each(:names) where true
    on conflict (key) do update set seen_at = excluded.seen_at where seen_at < excluded.seen_at - 86400;
delete from holdfast_lock_name where key in (select key from holdfast_lock_name where seen_at < {now} - 30 * 86400 limit 1000);
select changes() as written;

-- name: lock_list
-- The names alone: who holds them is the kernel's to tell.
select name, null as namespace, key from holdfast_lock_name union all select null, name, id from holdfast_lock_namespace;

-- name: audit_note
-- stop
select 0 as done where not exists (select 1 from holdfast_audit where id = :entry and outcome is null);
update holdfast_audit set fence = coalesce(:fence, fence), detail = coalesce(:detail, detail) where id = :entry;
select 1 as done;

-- name: audit_list
select id, at, actor, null as role, action, subject, reason, fence, detail, outcome, ended_at from holdfast_audit order by id desc limit :most;

-- name: audit_begin
insert into holdfast_audit (at, actor, action, subject, reason, detail) values ({now}, :actor, :action, :subject, :reason, :detail);
select last_insert_rowid() as entry;

-- name: audit_end
-- stop
select 0 as done where not exists (select 1 from holdfast_audit where id = :entry and outcome is null);
update holdfast_audit set outcome = :outcome, ended_at = {now} where id = :entry;
select 1 as done;

-- name: protect
update holdfast_lease set fence = fence where name = :name and token = :token
   and exists (select 1 from holdfast_live v where v.name = :name and v.token = :token) returning fence;

-- name: object_swap
-- What most writes are: a text at the version expected. It needs no transaction around it.
-- stop
update holdfast_object set body = :body, raw = null, updated_at = {now},
       version = (select (last + 1) << 20 | (random() & 1048575) from holdfast_object_place)
 where type = :type and id = :id and version = :expected
returning 'done' as status, version, created_at, updated_at, name, labels;
select 'conflict' as status, version as current from (select 1) left join holdfast_object on type = :type and id = :id;

-- name: object_put
-- stop
insert into holdfast_object (type, id, name, body, raw, labels, version, created_at, updated_at)
select :type, :id, :name, :body, :raw, coalesce(:labels, '{}'), (last + 1) << 20 | (random() & 1048575), {now}, {now} from holdfast_object_place
 where (:condition <> 'match' or exists (select 1 from holdfast_object where type = :type and id = :id and version = :expected))
   and not exists (select 1 from holdfast_object where type = :type and name = :name and id <> :id)
   and (:lease is null or exists (select 1 from holdfast_live v where v.name = :lease and v.token = :lease_token))
    on conflict (type, id) do update set body = excluded.body, raw = excluded.raw, version = excluded.version, updated_at = excluded.updated_at,
       name = case when :rename then excluded.name else name end, labels = coalesce(:labels, labels)
 where :condition <> 'create'
returning 'done' as status, version, created_at, updated_at, name, labels, null as current, null as owner;
-- stop
select 'fenced' as status where :lease is not null and not exists (select 1 from holdfast_live v where v.name = :lease and v.token = :lease_token);
-- stop
select case when :condition = 'create' then 'exists' else 'conflict' end as status, version as current, null as owner
  from (select 1) left join holdfast_object on type = :type and id = :id
 where :condition = 'create' and version is not null or :condition = 'match' and version is not :expected;
select 'taken' as status, version as current, id as owner from holdfast_object where type = :type and name = :name and id <> :id;

-- name: object_put_many
-- Each is looked for by its key. Nothing is ever inserted: what is there already is updated, and what is not is not selected.
-- Places are drawn without a gap: whoever watches from before one would be told that something is missing.
insert into holdfast_object (type, id, body, version, created_at, updated_at)
select o.type, o.id, r.value ->> '$.body', (p.last + row_number() over (order by r.key)) << 20 | (random() & 1048575), o.created_at, {now}
  from json_each(:records) r cross join holdfast_object o cross join holdfast_object_place p
 where o.type = :type and o.id = r.value ->> '$.id' and o.version = r.value ->> '$.expected'
   and exists (select 1 from holdfast_live v where v.name = :lease and v.token = :lease_token)
    on conflict (type, id) do update set body = excluded.body, raw = null, version = excluded.version, updated_at = excluded.updated_at
returning id, version;

-- name: object_delete
-- stop
delete from holdfast_object where type = :type and id = :id and version = :expected
   and (:lease is null or exists (select 1 from holdfast_live v where v.name = :lease and v.token = :lease_token))
returning 'done' as status, null as current;
-- stop
select 'fenced' as status where :lease is not null and not exists (select 1 from holdfast_live v where v.name = :lease and v.token = :lease_token);
select 'conflict' as status, version as current from (select 1) left join holdfast_object on type = :type and id = :id;

-- name: object_get
select name, body, raw, labels, version, created_at, updated_at from holdfast_object where type = :type and id = :id;

-- name: object_get_by_name
select id, body, raw, labels, version, created_at, updated_at from holdfast_object where type = :type and name = :name;

-- name: object_list
select id, name, body, raw, labels, version, created_at, updated_at from holdfast_object
 where type = :type and id > coalesce(:after, '')
   and not exists (select 1 from json_each(:labels) w where not exists (select 1 from json_each(labels) h where h.key = w.key and h.value = w.value))
 order by id limit :most;

-- name: object_cursor
select cast(last as text) as cursor, last << 20 | 1048575 as version, {now} as now from holdfast_object_place;

-- name: object_changes
-- One statement, so one look at the file: nothing is trimmed between the question whether it is all there and the reading.
select v.last as snapshot, c.version >> 20 as place, c.version, c.type, c.id, c.kind,
       :since >> 28 <> v.last >> 28 or :since > v.last
       or :since + 1 < (select min(version) >> 20 from holdfast_object_change where version > v.last >> 28 << 48) as expired
  from holdfast_object_place v left join (
       select * from holdfast_object_change where version >= (coalesce(:after, :since) + 1) << 20 and (:type is null or type = :type)
        order by version limit :most) c
 order by c.version;

-- name: operation_get
select status, fingerprint, result, result_hash, error, attempt, fence, wal_pointer as pointer, rollback, effect_started, failures, alive,
       coalesce(expires_at <= {now}, 0) as expired, {now} as now
  from (select 1) left join holdfast_operation on idem_key = :key;

-- name: operation_begin
-- The first statement changes nothing, and makes this transaction the one that writes.
update holdfast_idempotency_log set attempt = attempt where 0;
select json_object('state', case when exists (select 1 from holdfast_live where name = :lease) then 'busy' else 'free' end, 'began', null, 'fixed', 1,
       'now', {now}, 'known', case when status is not null then json_object(
       'status', status, 'fingerprint', fingerprint, 'result', result, 'result_hash', result_hash, 'error', error, 'attempt', attempt, 'fence', fence,
       'pointer', wal_pointer, 'rollback', rollback, 'effect_started', effect_started, 'failures', failures, 'alive', alive,
       'expired', coalesce(expires_at <= {now}, 0)) end) as answer
  from (select 1) left join holdfast_operation on idem_key = :key;

-- name: operation_write
-- stop
select 'fenced' as state where :token is not null and not exists (select 1 from holdfast_live where name = :owner and token = :token);
-- stop
select 'changed' as state where :expected is not (select wal_pointer from holdfast_idempotency_log where idem_key = :key);
insert into holdfast_idempotency_log values (:key, :pipeline, :task, :dataset, :operation, :status, :result_hash, {now}, {now}, :checksum, :params_hash, :pointer,
       :fingerprint, :result, :attempt, :fence, :error, {now} + :keep, :label, :owner, :rollback, :effect_started, :failures)
    on conflict (idem_key) do update set status = excluded.status, result_hash = excluded.result_hash, updated_at = excluded.updated_at,
       wal_pointer = excluded.wal_pointer, fingerprint = excluded.fingerprint, result = excluded.result, attempt = excluded.attempt, fence = excluded.fence,
       error = excluded.error, expires_at = excluded.expires_at, owner = excluded.owner, rollback = excluded.rollback, effect_started = excluded.effect_started, failures = excluded.failures;
insert into holdfast_wal (idem_key, number, at, entries) values (:key, :number, {now}, :entries);
insert into holdfast_outbox (idem_key, attempt, topic, payload, created_at)
select :key, :attempt, json_extract(value, '$[0]'), json_extract(value, '$[1]'), {now} from json_each(coalesce(:outbox, '[]'));
select 'done' as state;

-- name: operation_end
-- as: operation_write

-- name: operation_claim_many
-- stop
select 'fenced' as state where not exists (select 1 from holdfast_live where name = :owner and token = :token);
insert into holdfast_idempotency_log
select value ->> 0, value ->> 5, value ->> 6, value ->> 7, value ->> 8, 'partial', null, {now}, {now}, value ->> 9, value ->> 10, value ->> 1, value ->> 4, null, 1,
       :fence, null, null, value ->> 3, :owner, :rollback, 1, 0 from json_each(:rows) where true on conflict do nothing;
insert into holdfast_wal (idem_key, number, at, entries)
select g.idem_key, 1, {now}, value ->> 2 from json_each(:rows) join holdfast_idempotency_log g on g.idem_key = value ->> 0 and g.wal_pointer = value ->> 1
 where true on conflict do nothing;
select null as state, g.idem_key as key, g.status, g.fingerprint, g.result, g.result_hash, g.error, g.attempt, g.fence, g.wal_pointer as pointer,
       g.rollback, g.effect_started, g.failures, g.alive, coalesce(g.expires_at <= {now}, 0) as expired, {now} as now
  from json_each(:rows) join holdfast_operation g on g.idem_key = value ->> 0 and g.wal_pointer <> value ->> 1;

-- name: operation_finish_many
-- stop
select 'fenced' as state where not exists (select 1 from holdfast_live where name = :owner and token = :token);
insert into holdfast_outbox (idem_key, attempt, topic, payload, created_at)
select g.idem_key, g.attempt, json_extract(o.value, '$[0]'), json_extract(o.value, '$[1]'), {now}
  from json_each(:rows) e join holdfast_idempotency_log g on g.idem_key = e.value ->> 0 and g.wal_pointer = e.value ->> 1
  join json_each(coalesce(e.value ->> 11, '[]')) o;
update holdfast_idempotency_log set status = value ->> 5, result = value ->> 6, result_hash = value ->> 7, error = value ->> 8, updated_at = {now},
       wal_pointer = value ->> 2, failures = value ->> 9, effect_started = value ->> 10,
       expires_at = case value ->> 5 when 'success' then {now} + :keep end
  from json_each(:rows) where idem_key = value ->> 0 and wal_pointer = value ->> 1;
insert into holdfast_wal (idem_key, number, at, entries)
select g.idem_key, value ->> 3, {now}, value ->> 4 from json_each(:rows) join holdfast_idempotency_log g on g.idem_key = value ->> 0 and g.wal_pointer = value ->> 2
 where true on conflict do nothing;
select value ->> 0 as key, null as state from json_each(:rows)
 where not exists (select 1 from holdfast_idempotency_log g where g.idem_key = value ->> 0 and g.wal_pointer = value ->> 2);

-- name: operation_list
-- Of those that were touched in the same millisecond, the one that was begun last.
select idem_key as key, label, status, alive, attempt, fence, pipeline_id as pipeline, task_id as task, dataset_id as dataset, operation_type as operation,
       result_hash, error, wal_pointer as pointer, rollback, owner, effect_started, failures, created_at, updated_at, expires_at
  from holdfast_operation
 where (:status is null or status = :status) and (:dataset is null or dataset_id = :dataset) and (:key is null or idem_key = :key)
 order by updated_at desc, place desc limit :most;

-- name: operation_entries
select number, entries from holdfast_wal where idem_key = :key and number > coalesce(:after_number, 0) order by number limit :most;

-- name: operation_kin
select (select label || ' (' || idem_key || ')' from holdfast_idempotency_log
         where dataset_id = :dataset and operation_type = :operation and raw_checksum is :checksum and params_hash = :params_hash
           and idem_key <> :key and status <> 'failure' limit 1) as same,
       (select label || ' (' || idem_key || ')' from holdfast_idempotency_log
         where dataset_id = :dataset and operation_type = :operation and params_hash = :params_hash and pipeline_id = :pipeline and task_id = :task
           and raw_checksum is not :checksum and (status = 'partial' or status = 'failure' and failures > 0) limit 1) as retry_of;

-- name: review_open
update holdfast_review set closed_at = {now}, spent_at = {now}, outcome = 'done'
 where id in (select id from holdfast_review_now where idem_key = :key and closed_at is null and status = 'done');
-- stop
select id from holdfast_review where idem_key = :key and reason = :reason and closed_at is null;
insert into holdfast_review (idem_key, label, dataset_id, operation_type, reason, detail, opened_at)
values (:key, :label, :dataset, :operation, :reason, :detail, {now});
select id from holdfast_review where idem_key = :key and reason = :reason and closed_at is null;

-- name: review_take
-- stop
select id, status as outcome, actor, answer from holdfast_review_now
 where idem_key = :key and spent_at is null and (status = 'rejected' or status = 'open' and reason <> 'attempts')
 order by status <> 'rejected', id limit 1;
-- stop
select null as id where not exists (select 1 from holdfast_review where idem_key = :key and outcome = 'approved' and spent_at is null);
update holdfast_review set spent_at = {now}
 where id = (select min(id) from holdfast_review where idem_key = :key and outcome = 'approved' and spent_at is null)
returning id, outcome, actor, answer;

-- name: review_return
update holdfast_review set spent_at = null where id = :id and outcome = 'approved' returning true as returned;

-- name: review_list
select id, idem_key as key, label, dataset_id as dataset, operation_type as operation, reason, detail, opened_at, status, actor,
       answer, closed_at, spent_at
  from holdfast_review_now
 where (:status is null or status = :status) and (:id is null or id = :id) and (:key is null or idem_key = :key) order by id limit :most;

-- name: review_decide
update holdfast_review set closed_at = {now}, outcome = :outcome, actor = :actor, answer = :answer
 where id = (select id from holdfast_review_now where id = :id and status = 'open');
select changes() as decided;

-- name: operation_failed
select coalesce(sum(failures), 0) as failed from holdfast_idempotency_log
 where status <> 'success' and updated_at > {now} - :seconds and status = 'failure' and failures > 0 and dataset_id is :dataset;

-- name: examine_journal
select journal_mode as mode from pragma_journal_mode;

-- name: examine_integrity
select quick_check as problem from pragma_quick_check('holdfast_lease') where quick_check <> 'ok'
union all select quick_check from pragma_quick_check('holdfast_beat') where quick_check <> 'ok'
union all select quick_check from pragma_quick_check('holdfast_fence') where quick_check <> 'ok'
union all select quick_check from pragma_quick_check('holdfast_history') where quick_check <> 'ok'
union all select quick_check from pragma_quick_check('holdfast_object') where quick_check <> 'ok'
union all select quick_check from pragma_quick_check('holdfast_object_change') where quick_check <> 'ok';

-- name: examine_write_lock
-- Not a select, so it takes the write lock; and writes nothing.
values (1);

-- name: wal_chains
with known (key) as (
    select key from (select idem_key as key from holdfast_idempotency_log
                      where idem_key between coalesce(:key, :after, '') and coalesce(:key, 'g') and idem_key is not :after
                        and (:since is null or updated_at >= :since)
                     union
                     select idem_key from holdfast_wal
                      where idem_key between coalesce(:key, :after, '') and coalesce(:key, 'g') and idem_key is not :after
                        and (:since is null or at >= :since))
     order by key limit :most)
select k.key, w.number, w.entries, g.label, g.status, g.attempt, g.wal_pointer as pointer, coalesce(g.alive, 0) as alive, g.result, g.result_hash,
       g.fingerprint, g.effect_started, g.error, g.failures, g.fence, g.owner, g.rollback, g.expires_at - g.updated_at as keep,
       g.pipeline_id as pipeline, g.task_id as task, g.dataset_id as dataset, g.operation_type as operation, g.raw_checksum as checksum, g.params_hash
  from known k left join holdfast_operation g on g.idem_key = k.key left join holdfast_wal w on w.idem_key = k.key
 order by k.key, w.number;

-- name: wal_latest
with known (key) as (
    select idem_key from (select idem_key from holdfast_idempotency_log order by updated_at desc limit :most)
    union select idem_key from (select idem_key from holdfast_wal order by id desc limit :most))
select k.key, w.number, w.entries, g.label, g.status, g.attempt, g.wal_pointer as pointer, coalesce(g.alive, 0) as alive, g.result, g.result_hash,
       g.fingerprint, g.effect_started, g.error, g.failures, g.fence, g.owner, g.rollback, g.expires_at - g.updated_at as keep,
       g.pipeline_id as pipeline, g.task_id as task, g.dataset_id as dataset, g.operation_type as operation, g.raw_checksum as checksum, g.params_hash
  from known k left join holdfast_operation g on g.idem_key = k.key left join holdfast_wal w on w.idem_key = k.key
 order by k.key, w.number;

-- name: wal_find
select idem_key as key from holdfast_wal where substr(entries, -67) = '"' || :hash || '"]' or substr(entries, 1, 67) = '["' || :hash || '"' limit 1;

-- name: wal_read
-- There is one writer at a time, so the order of the rows is that of the commits.
select 0 as epoch, 0 as horizon, w.id as place, w.idem_key as key, w.entries
  from (select 1) left join (select * from holdfast_wal where id > coalesce(:after_place, 0) order by id limit :most) w order by w.id;

-- name: wal_archive
-- stop
select 'archived' as state where exists (select 1 from holdfast_idempotency_log where idem_key = :key and wal_pointer = :pointer);
-- stop
select 'changed' as state where not exists (
    select 1 from holdfast_idempotency_log where idem_key = :key and wal_pointer = :expected and status <> 'partial');
-- stop
select 'unpublished' as state where exists (select 1 from holdfast_outbox where idem_key = :key and published_at is null)
    or exists (select 1 from holdfast_relay where place < (select max(id) from holdfast_wal where idem_key = :key))
    or exists (select 1 from holdfast_parked where idem_key = :key);
update holdfast_idempotency_log set wal_pointer = :pointer where idem_key = :key;
-- In this order: the highest id must stay, or it would be used again, and whoever reads on after it would miss what has it.
insert into holdfast_wal (idem_key, number, at, entries) values (:key, :number, {now}, :entries);
delete from holdfast_wal where idem_key = :key and number < :number;
delete from holdfast_outbox where idem_key = :key;
select 'archived' as state;

-- name: review_close
update holdfast_review set closed_at = coalesce(closed_at, {now}), spent_at = {now}, outcome = coalesce(outcome, 'reset'), actor = coalesce(actor, :actor),
       answer = coalesce(answer, :answer) where idem_key = :key and spent_at is null;
select changes() as closed;

-- name: operation_expire
update holdfast_idempotency_log set result = null where idem_key in (
    select idem_key from holdfast_idempotency_log where result is not null and expires_at <= {now} order by expires_at limit :most);
select changes() as gone;

-- name: operation_health
-- Never reads the whole log: what is unfinished, expired or unpublished has an index, and rows are numbered. What somebody has
-- reset or rolled back, as its error says, is not counted as failed.
select (select coalesce(max(rowid), 0) from holdfast_idempotency_log) as operations, coalesce(sum(status = 'partial'), 0) as partial,
       coalesce(sum(status = 'partial' and not alive), 0) as orphaned,
       coalesce(sum(status = 'partial' and not alive and updated_at < {now} - :stale), 0) as stale_partials,
       {now} - min(case when status = 'partial' and not alive then updated_at end) as oldest, coalesce(sum(status = 'failure' and error not like '%"actor": %'), 0) as failed,
       (select count(*) from (select 1 from holdfast_idempotency_log where updated_at > {now} - 86400 limit 10 * :enough)) as today,
       (select page_count * page_size from pragma_page_count(), pragma_page_size()) as bytes,
       (select count(*) from (select 1 from holdfast_idempotency_log where result is not null and expires_at <= {now} limit :enough)) as expired,
       (select count(*) from holdfast_outbox where published_at is null) as unpublished,
       {now} - (select min(created_at) from holdfast_outbox where published_at is null) as lag,
       (select count(*) from holdfast_review_now where status = 'open') as reviews, {now} as now
  from (select status, updated_at, alive, error from holdfast_operation where status <> 'success' order by updated_at limit :enough);

-- name: operation_indexes
-- Those of its keys are part of a table here, and the log is in the order of its rows: neither can be taken away.
select substr(name, length('holdfast_') + 1) as name from sqlite_master
 where type = 'index' and tbl_name in ('holdfast_idempotency_log', 'holdfast_wal', 'holdfast_outbox', 'holdfast_review')
union all select column1 from (values ('idempotency_log_pkey'), ('wal_pkey'), ('wal_order'));

-- name: relay_read
select 0 as horizon, w.id as place, w.idem_key as key, w.number, w.entries,
       case when w.number > 1 and (w.entries like '%"success"%' or w.entries like '%"failure"%' or w.entries like '%"rollback"%' or w.entries like '%"reset"%')
            then (select json_group_array(b.entries) from (
            select entries from holdfast_wal where idem_key = w.idem_key and number < w.number order by number) b) end as before,
       case when w.entries like '%"success"%' then (select json_group_array(json_array(o.attempt, o.topic, o.payload)) from (
            select * from holdfast_outbox where idem_key = w.idem_key order by id) o) end as outbox,
       g.label, g.pipeline_id as pipeline, g.task_id as task, g.dataset_id as dataset, g.operation_type as operation, g.raw_checksum as checksum, g.params_hash
  from holdfast_wal w left join holdfast_idempotency_log g on g.idem_key = w.idem_key
 where w.id > coalesce(:after_place, 0) order by w.id limit :most;

-- name: relay_open
-- stop
select 'fenced' as state where not exists (select 1 from holdfast_live where name = :lease and name = '@relay:' || :name and token = :token);
insert into holdfast_relay (name, place, told, fence, moved_at) values (:name, 0, 0, 0, {now}) on conflict do nothing;
select 'done' as state, 0 as horizon, place, tries, taken, coalesce({now} - (select at from holdfast_wal where id > r.place order by id limit 1), 0) as lag
  from holdfast_relay r where name = :name;

-- name: relay_begin
-- stop
select 'fenced' as state where not exists (select 1 from holdfast_live where name = :lease and name = '@relay:' || :name and token = :token);
update holdfast_relay set tries = :tries where name = :name;
select 'begun' as state;

-- name: relay_move
-- stop
select 'fenced' as state where not exists (select 1 from holdfast_live where name = :lease and name = '@relay:' || :name and token = :token);
-- stop
select 'gone' as state where not exists (select 1 from holdfast_relay where name = :name);
update holdfast_relay set moved_at = case when place = :place then moved_at else {now} end, place = :place, told = told + :told, fence = :fence,
       problem = :problem, tries = :tries, taken = coalesce(:taken, taken), since = case when :problem is not null then coalesce(since, {now}) end where name = :name;
update holdfast_outbox set published_at = {now} where published_at is null and exists (
    select 1 from json_each(:ended) where idem_key = value ->> 0 and attempt <= value ->> 1);
delete from holdfast_parked where relay = :name and id in (select value from json_each(:freed));
insert into holdfast_parked select :name, value ->> 0, value ->> 1, value ->> 2, value ->> 3, value ->> 4, {now}, 0 from json_each(:parked) where true
    on conflict (relay, id) do update set problem = excluded.problem, tries = tries + excluded.tries, again = 0;
select 'moved' as state;

-- name: relay_list
select r.name, r.told, r.fence, r.moved_at, r.problem, r.since, (select holder from holdfast_live where name = '@relay:' || r.name) as holder,
       (select count(*) from holdfast_parked where relay = r.name) as parked, (select count(*) from (select 1 from holdfast_wal where id > r.place limit 100000)) as entries,
       coalesce({now} - (select at from holdfast_wal where id > r.place order by id limit 1), 0) as lag, '0/' || r.place as cursor
  from holdfast_relay r order by r.name;

-- name: relay_parked
select id, idem_key as key, event, problem, tries, parked_at, again from holdfast_parked
 where relay = :name and (again or not :only_again) order by rowid limit :most;

-- name: relay_retry
update holdfast_parked set again = 1 where relay = :name and (:id is null or id = :id);
select changes() as asked;

-- name: relay_remove
delete from holdfast_parked where relay = :name;
delete from holdfast_relay where name = :name;
select changes() as removed;
