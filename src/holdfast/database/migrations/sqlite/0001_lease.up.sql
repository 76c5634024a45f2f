-- The durable lease in one file. Every script that writes runs inside BEGIN IMMEDIATE: SQLite's single writer replaces the
-- row locks of PostgreSQL. The clock is the machine's (unixepoch('subsec') is NULL before 3.42).
-- Columns have the hashes of secrets: of tokens, of the ids by which a process renews its beats, and of the secrets of re-entry. Parameters
-- of statements are hashes, too: see with_hashes in sqlite_calls.py.

create table holdfast_schema_version (
    version    integer primary key,
    name       text not null,
    applied_at real not null default ((julianday('now') - 2440587.5) * 86400.0)
);

-- Fences, versions and places of the log are at least the clock, in microseconds since 2026. So they rise although WAL mode may lose the
-- last commits when the machine goes down, and although the file may be replaced by an older copy.
create view holdfast_clock as select cast(((julianday('now') - 2440587.5) * 86400.0 - 1767225600) * 1000000 as integer) as micros;

create table holdfast_fence (one integer primary key check (one = 1), last integer not null, boot text);
insert into holdfast_fence values (1, 0, null);

create table holdfast_beat (
    id          text primary key,
    ttl         real not null check (ttl between 0.05 and 86400),
    expires_at  real not null,
    dead        integer not null default 0,
    generation  integer not null default 0,
    solo        integer not null,
    session_key integer,
    label       text not null,
    host        text,
    pid         integer,
    started     real not null,
    info        text check (length(info) <= 4096)
) without rowid;

create table holdfast_lease (
    name        text primary key,
    holder      text not null,
    beat        text not null,
    token       text not null,
    fence       integer not null,
    acquired_at real not null,
    keep_until  real,
    kept        integer not null default 0,
    kind        text not null,
    reenter     text
) without rowid;

create table holdfast_history (
    id          integer primary key,
    name        text not null,
    holder      text not null,
    host        text,
    pid         integer,
    fence       integer not null,
    acquired_at real not null,
    ended_at    real not null,
    outcome     text not null check (outcome in ('released', 'expired', 'session_lost', 'reentered', 'forced')),
    actor       text,
    reason      text
);

-- Keep the newest 10,000 rows on insert: perhaps no process ever purges. The semicolon begins its line, because a semicolon at the
-- end of a line ends the statement for the reader of this file.
create trigger holdfast_history_trim after insert on holdfast_history when new.id % 100 = 0 begin
    delete from holdfast_history where id <= new.id - 10000
    ; end;

-- Leases whose beat is alive; every other name is free.
create view holdfast_live as
select l.name, l.kind, l.holder, l.beat, l.token, l.fence, l.acquired_at, l.kept, l.reenter, b.ttl, b.expires_at, b.session_key, b.host, b.pid,
       json_patch(coalesce(b.info, '{}'), json_object('label', b.label, 'started', b.started, 'ttl', b.ttl,
                  'failover', case when b.session_key is not null then 'session' end)) as info,
       b.expires_at - (julianday('now') - 2440587.5) * 86400.0 as remaining
  from holdfast_lease l join holdfast_beat b on b.id = l.beat
 where not b.dead and b.expires_at > (julianday('now') - 2440587.5) * 86400.0;

insert into holdfast_schema_version (version, name) values (1, 'lease');
