-- The kernel holds the locks, so they need no table. These tables give them names and ages in listings.

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

-- Since when a process holds a lock, and how many requests wait for it there. Rows of ended processes are ignored, and deleted
-- by the next one that writes. session: one of the process; since: null if it does not hold the lock.
create table holdfast_lock_hold (
    session     text not null,
    pid         integer not null,
    application text not null,
    pair        integer not null,
    key         integer not null,
    since       real,
    waiting     integer not null,
    primary key (session, pair, key)
) without rowid;

insert into holdfast_schema_version (version, name) values (2, 'lock');
