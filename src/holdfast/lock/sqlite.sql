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
