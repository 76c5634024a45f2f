-- name: relay_read
select 0 as horizon, w.place, w.idem_key as key, w.number, w.entries,
       case when w.number > 1 and (w.entries like '%"success"%' or w.entries like '%"failure"%' or w.entries like '%"rollback"%' or w.entries like '%"reset"%')
            then (select json_group_array(b.entries) from (
            select entries from holdfast_wal where idem_key = w.idem_key and number < w.number order by number) b) end as before,
       case when w.entries like '%"success"%' then (select json_group_array(json_array(o.attempt, o.topic, o.payload)) from (
            select * from holdfast_outbox where idem_key = w.idem_key order by id) o) end as outbox,
       g.label, g.pipeline_id as pipeline, g.task_id as task, g.dataset_id as dataset, g.operation_type as operation, g.raw_checksum as checksum, g.params_hash
  from (select place, idem_key, 1 as number, entries from holdfast_idempotency_log where entries is not null and place > coalesce(:after_place, 0)
        union all select place, idem_key, number, entries from holdfast_wal_more where place > coalesce(:after_place, 0)
        order by place limit :limit) w left join holdfast_idempotency_log g on g.idem_key = w.idem_key
 order by w.place;

-- name: relay.lease
select 1 from holdfast_live where name = :lease and name = '@relay:' || :name and token = :token;

-- name: relay_open.insert
insert into holdfast_relay (name, place, told, fence, moved_at) values (:name, 0, 0, 0, {now}) on conflict do nothing;

-- name: relay_open.cursor
select 'done' as state, 0 as horizon, place, tries, taken, coalesce({now} - (
           select at from (select place, created_at as at from holdfast_idempotency_log where entries is not null and place > r.place
                           union all select place, at from holdfast_wal_more where place > r.place order by place limit 1)), 0) as lag
  from holdfast_relay r where name = :name;

-- name: relay_begin.tries
update holdfast_relay set tries = :tries where name = :name;

-- name: relay_move.relay
select 1 from holdfast_relay where name = :name and (place = :place or exists (select 1 from holdfast_wal where place = :place));

-- name: relay_move.cursor
update holdfast_relay set moved_at = case when place = :place then moved_at else {now} end, place = :place, told = told + :told, fence = :fence,
       problem = :problem, tries = :tries, taken = coalesce(:taken, taken), since = case when :problem is not null then coalesce(since, {now}) end where name = :name;

-- name: relay_move.published
update holdfast_outbox set published_at = {now} where published_at is null and exists (
    select 1 from json_each(:ended) where idem_key = value ->> 0 and attempt <= value ->> 1);

-- name: relay_move.unparked
delete from holdfast_parked where relay = :name and id in (select value from json_each(:freed));

-- name: relay_move.parked
insert into holdfast_parked select :name, value ->> 0, value ->> 1, value ->> 2, value ->> 3, value ->> 4, {now}, 0 from json_each(:parked) where true
    on conflict (relay, id) do update set problem = excluded.problem, tries = tries + excluded.tries, again = 0;

-- name: relay_list
select r.name, r.told, r.fence, r.moved_at, r.problem, r.since, (select holder from holdfast_live where name = '@relay:' || r.name) as holder,
       (select count(*) from holdfast_parked where relay = r.name) as parked, (select count(*) from (select 1 from holdfast_wal where place > r.place limit 100000)) as entries,
       coalesce({now} - (
           select at from (select place, created_at as at from holdfast_idempotency_log where entries is not null and place > r.place
                           union all select place, at from holdfast_wal_more where place > r.place order by place limit 1)), 0) as lag, '0/' || r.place as cursor
  from holdfast_relay r order by r.name;

-- name: relay_parked
select id, idem_key as key, event, problem, tries, parked_at, again from holdfast_parked
 where relay = :name and (again or not :only_again) order by rowid limit :limit;

-- name: relay_retry.update
update holdfast_parked set again = 1 where relay = :name and (:id is null or id = :id);

-- name: relay_remove.audit
insert into holdfast_audit (at, actor, action, subject, reason, detail, outcome, ended_at)
select {now}, :actor, 'relay_remove', name, :reason, json_object('cursor', '0/' || place), 'done', {now} from holdfast_relay where name = :name;

-- name: relay_remove.parked
delete from holdfast_parked where relay = :name;

-- name: relay_remove.relay
delete from holdfast_relay where name = :name;
