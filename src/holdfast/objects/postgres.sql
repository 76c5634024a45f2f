-- name: object_put
-- Explicit casts to types that every database driver knows, because this also runs on the user's own connection. The function
-- is in the select list: in FROM its rows would be materialized first.
select (r).status, (r).version, (r).created_at, (r).updated_at, (r).name, (r).labels::text, (r).current, (r).owner
  from (select holdfast.object_put_if(
    cast(:type as text), cast(:id as text), cast(:body as text), cast(:expected as bigint), cast(:name as text),
    cast(cast(:labels as text) as jsonb), cast(cast(:raw as text) as bytea), cast(:lease as text),
    cast(cast(:lease_token as text) as uuid), cast(cast(:token as text) as uuid), cast(:again as boolean), cast(:late as boolean)) as r) as put

-- name: object_swap
select (r).status, (r).version, (r).created_at, (r).updated_at, (r).name, (r).labels, (r).current from (select holdfast.object_swap(
    :type, :id, :body, :expected::bigint, :token::uuid, :again::boolean, :lease, :lease_token::uuid) as r) as swap

-- name: object_delete
select status, current from holdfast.object_delete_if(
    cast(:type as text), cast(:id as text), cast(:expected as bigint), cast(:lease as text), cast(cast(:lease_token as text) as uuid),
    cast(cast(:token as text) as uuid), cast(:again as boolean), cast(:late as boolean))

-- name: object_get
select name, body, raw, labels, version, created_at, updated_at from holdfast.object_get(:type, :id)

-- name: object_get_by_name
select id, body, raw, labels, version, created_at, updated_at from holdfast.object_get_by_name(:type, :name)

-- name: object_list
select id, name, body, raw, labels, version, created_at, updated_at from holdfast.object_list(:type, :labels::jsonb, :after, :limit::int)

-- name: object_list_within
select id, name, body, raw, labels, version, created_at, updated_at
  from holdfast.object_list(:type, :labels::jsonb, :after, :limit::int, :max_bytes::bigint)

-- name: object_cursor
select cursor, version, extract(epoch from clock_timestamp())::double precision as now from holdfast.object_cursor()

-- name: object_changes
select snapshot, place, version, type, id, kind, change, expired from holdfast.object_changes(
    :space::bigint, :since::pg_snapshot, :newest, :until::pg_snapshot, :after::bigint, :after_change, :type, :limit::int, :listening::boolean)
