-- name: lock_namespace.id
select id from holdfast_lock_namespace where name = :name;

-- name: lock_namespace.insert
insert into holdfast_lock_namespace (name) values (:name) on conflict do nothing;

-- name: lock_remember.names
insert into holdfast_lock_name (key, name, seen_at)
select json_extract(value, '$[0]'), json_extract(value, '$[1]'), {now} from json_each(:names) where true
    on conflict (key) do update set seen_at = excluded.seen_at where seen_at < excluded.seen_at - 86400;

-- name: lock_remember.forget
delete from holdfast_lock_name where key in (select key from holdfast_lock_name where seen_at < {now} - 30 * 86400 limit 1000);

-- name: lock_list
-- The names alone: only the kernel knows who holds them.
select name, null as namespace, key from holdfast_lock_name union all select null, name, id from holdfast_lock_namespace;
