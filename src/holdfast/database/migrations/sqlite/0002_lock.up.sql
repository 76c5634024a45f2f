-- The kernel holds the locks, so they need no table. These tables give them names in listings.

create table holdfast_lock_namespace (
    id   integer primary key check (id between 1 and 2147483646),
    name text not null unique
);

create table holdfast_lock_name (
    key     integer primary key,
    name    text not null,
    seen_at real not null
);
create index holdfast_lock_name_seen_at on holdfast_lock_name (seen_at);

insert into holdfast_schema_version (version, name) values (2, 'lock');
