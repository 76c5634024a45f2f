-- name: lock_namespace.id
select id from holdfast_lock_namespace where name = :name;

-- name: lock_namespace.insert
insert into holdfast_lock_namespace (name) values (:name) on conflict do nothing;

-- name: lock_note.names
insert into holdfast_lock_name (key, name, seen_at)
select json_extract(value, '$[0]'), json_extract(value, '$[1]'), {now} from json_each(:names) where true
    on conflict (key) do update set seen_at = excluded.seen_at where seen_at < excluded.seen_at - 86400;

-- name: lock_note.forget
delete from holdfast_lock_name where key in (select key from holdfast_lock_name where seen_at < {now} - 30 * 86400 limit 1000);

-- name: lock_note.pids
select distinct pid from holdfast_lock_hold;

-- name: lock_note.ended
delete from holdfast_lock_hold where pid in (select value from json_each(:pids));

-- name: lock_note.stale
delete from holdfast_lock_hold where pid = :pid and session not in (select value from json_each(:live));

-- name: lock_note.gone
delete from holdfast_lock_hold
 where session = :session
   and (pair, key) in (select json_extract(value, '$[0]'), json_extract(value, '$[1]') from json_each(:gone));

-- name: lock_note.held
insert or replace into holdfast_lock_hold (session, pid, application, pair, key, since, waiting)
select :session, :pid, :application, json_extract(value, '$[0]'), json_extract(value, '$[1]'), json_extract(value, '$[2]'),
       json_extract(value, '$[3]')
  from json_each(:held);

-- name: lock_list
-- Names and ages: who holds a lock, only the kernel knows.
select name, null as namespace, key, null as pid, null as application, null as pair, null as since, 0 as waiting
  from holdfast_lock_name
 union all
select null, name, id, null, null, null, null, 0 from holdfast_lock_namespace
 union all
select null, null, key, pid, application, pair, since, waiting from holdfast_lock_hold;
