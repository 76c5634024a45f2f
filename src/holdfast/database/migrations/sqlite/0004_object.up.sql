-- Compare-and-swap records, and the log of their changes. There is one writer at a time, so the places in the log, which
-- the writer draws, are in commit order. Triggers write the log: a write is one statement and two pages of the file.
--
-- A version is its place and 13 random bits: after a rollback the place may be drawn again, and a client that read a version in
-- the rolled-back transaction must not match the later write of another client.

-- first: places start above it. trimmed: the version of the newest change that was trimmed.
create table holdfast_object_version (one integer primary key check (one = 1), first integer not null, trimmed integer not null);
insert into holdfast_object_version values (1, 0, 0);

create table holdfast_object (
    type       text not null,
    id         text not null,
    name       text,
    body       text,
    raw        blob,
    labels     text not null default '{}',
    version    integer not null,
    created_at real not null,
    updated_at real not null,
    primary key (type, id),
    check ((body is null) <> (raw is null))
);
create unique index holdfast_object_name on holdfast_object (type, name) where name is not null;

create table holdfast_object_change (
    version integer primary key,
    type    text not null,
    id      text not null,
    kind    text not null check (kind in ('created', 'updated', 'deleted')),
    number  integer not null
);

-- The place of the next change, and its number: places have gaps, numbers have none.
create view holdfast_object_next as
select max(max(v.first, coalesce(c.version >> 13, 0)) + 1, (select micros from holdfast_clock)) as place, coalesce(c.number, 0) + 1 as number
  from holdfast_object_version v left join (select version, number from holdfast_object_change order by version desc limit 1) c;

create trigger holdfast_object_created after insert on holdfast_object begin
    insert into holdfast_object_change select new.version, new.type, new.id, 'created', number from holdfast_object_next
    ; end;
create trigger holdfast_object_updated after update on holdfast_object begin
    insert into holdfast_object_change select new.version, new.type, new.id, 'updated', number from holdfast_object_next
    ; end;
create trigger holdfast_object_deleted after delete on holdfast_object begin
    insert into holdfast_object_change select place << 13, old.type, old.id, 'deleted', number from holdfast_object_next
    ; end;
-- Keep the newest 100,000 changes.
create trigger holdfast_object_trim after insert on holdfast_object_change when new.number & 1023 = 0 and new.number > 100000 begin
    update holdfast_object_version set trimmed = coalesce((
        select max(version) from (select version, number from holdfast_object_change order by version limit 5000)
         where number <= new.number - 100000), trimmed)
    ; delete from holdfast_object_change where version <= (select trimmed from holdfast_object_version)
    ; end;

insert into holdfast_schema_version (version, name) values (4, 'object');
