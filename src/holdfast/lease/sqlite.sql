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

-- name: protect
update holdfast_lease set fence = fence where name = :name and token = :token
   and exists (select 1 from holdfast_live v where v.name = :name and v.token = :token) returning fence;
