-- Compare-and-swap records, and the log of their changes. There is one writer at a time, so the places in the log, which
-- the writer draws, are in commit order. Triggers write the log: a write is one statement and two pages of the file.
--
-- A version is its place and 20 random bits: after a rollback the place is drawn again, and a client that read a version in
-- the rolled-back transaction must not match the later write of another client.

create table holdfast_object_version (one integer primary key check (one = 1), first integer not null);
insert into holdfast_object_version values (1, 0);

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
    kind    text not null check (kind in ('created', 'updated', 'deleted'))
);

-- The place drawn last: that of the newest change, or, after a boot, the place from which counting starts.
create view holdfast_object_place as
select max(first, coalesce((select max(version) from holdfast_object_change) >> 20, 0)) as last from holdfast_object_version;

create trigger holdfast_object_created after insert on holdfast_object begin
    insert into holdfast_object_change values (new.version, new.type, new.id, 'created')
    ; end;
create trigger holdfast_object_updated after update on holdfast_object begin
    insert into holdfast_object_change values (new.version, new.type, new.id, 'updated')
    ; end;
create trigger holdfast_object_deleted after delete on holdfast_object begin
    insert into holdfast_object_change select (last + 1) << 20, old.type, old.id, 'deleted' from holdfast_object_place
    ; end;
-- Keep the newest 100,000 changes.
create trigger holdfast_object_trim after insert on holdfast_object_change when (new.version >> 20) & 1023 = 0 begin
    delete from holdfast_object_change where version < ((new.version >> 20) - 99999) << 20
    ; end;

insert into holdfast_schema_version (version, name) values (4, 'object');
