-- name: object_swap.update
update holdfast_object set body = :body, raw = null, updated_at = {now},
       version = (select place << 13 | (random() & 8191) from holdfast_object_next)
 where type = :type and id = :id and version = :expected
   and (:lease is null or exists (select 1 from holdfast_live v where v.name = :lease and v.token = :lease_token))
returning 'done' as status, version, created_at, updated_at, name, labels;

-- name: object.conflict
select 'conflict' as status, version as current from (select 1) left join holdfast_object on type = :type and id = :id;

-- name: object.lease
select 1 from holdfast_live where name = :lease and token = :lease_token;

-- name: object_put.upsert
insert into holdfast_object (type, id, name, body, raw, labels, version, created_at, updated_at)
select :type, :id, nullif(:name, ''), :body, :raw, coalesce(:labels, '{}'), place << 13 | (random() & 8191), {now}, {now} from holdfast_object_next
 where (:expected < 1 or exists (select 1 from holdfast_object where type = :type and id = :id and version = :expected))
   and not exists (select 1 from holdfast_object where type = :type and name = :name and id <> :id)
   and (:lease is null or exists (select 1 from holdfast_live v where v.name = :lease and v.token = :lease_token))
    on conflict (type, id) do update set body = excluded.body, raw = excluded.raw, version = excluded.version, updated_at = excluded.updated_at,
       name = case when :name is null then name else excluded.name end, labels = coalesce(:labels, labels)
 where :expected <> 0
returning 'done' as status, version, created_at, updated_at, name, labels, null as current, null as owner;

-- name: object_put.refused
select case when :expected = 0 then 'exists' else 'conflict' end as status, version as current, null as owner
  from (select 1) left join holdfast_object on type = :type and id = :id
 where :expected >= 0 and coalesce(version, 0) <> :expected;

-- name: object_put.taken
select 'taken' as status, version as current, id as owner from holdfast_object where type = :type and name = :name and id <> :id;

-- name: object_delete.delete
delete from holdfast_object where type = :type and id = :id and version = :expected
   and (:lease is null or exists (select 1 from holdfast_live v where v.name = :lease and v.token = :lease_token))
returning 'done' as status, null as current;

-- name: object_get
select name, body, raw, labels, version, created_at, updated_at from holdfast_object where type = :type and id = :id;

-- name: object_get_by_name
select id, body, raw, labels, version, created_at, updated_at from holdfast_object where type = :type and name = :name;

-- name: object_list
select id, name, body, raw, labels, version, created_at, updated_at from holdfast_object
 where type = :type and id > coalesce(:after, '')
   and not exists (select 1 from json_each(:labels) w where not exists (select 1 from json_each(labels) h where h.key = w.key and h.value = w.value))
 order by id limit :limit;

-- name: object_list_within
with page as (
  select id, length(coalesce(cast(body as blob), raw)) as bytes from holdfast_object
   where type = :type and id > coalesce(:after, '')
     and not exists (select 1 from json_each(:labels) w where not exists (select 1 from json_each(labels) h where h.key = w.key and h.value = w.value))
   order by id limit :limit),
within as (select id, row_number() over (order by id) as place, sum(bytes) over (order by id) as bytes from page)
select o.id, o.name, o.body, o.raw, o.labels, o.version, o.created_at, o.updated_at
  from within w join holdfast_object o on o.type = :type and o.id = w.id
 where w.place = 1 or w.bytes <= :max_bytes
 order by o.id;

-- name: object_cursor
select cast(c.version as text) as cursor, c.version, {now} as now
  from (select coalesce((select max(version) from holdfast_object_change), trimmed) as version from holdfast_object_version) c;

-- name: object_changes
-- One statement, so one snapshot: nothing is trimmed between the check for completeness and the read.
select coalesce((select max(version) from holdfast_object_change), v.trimmed) as snapshot, c.version as place, c.version, c.type, c.id, c.kind, null as change,
       :since <> v.trimmed and not exists (select 1 from holdfast_object_change where version = :since) as expired
  from holdfast_object_version v left join (
       select * from holdfast_object_change where version > :since and (:type is null or type = :type) order by version limit :limit) c
 order by c.version;
