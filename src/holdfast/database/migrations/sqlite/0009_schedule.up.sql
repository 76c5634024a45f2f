-- Schedules: how far each has come, and what became of each slot. A slot is a time in microseconds since 1970.
create table holdfast_schedule (
    name       text primary key,
    every      text not null,
    zone       text,
    cursor     integer not null,
    paused     text,
    created_at real not null
);

create table holdfast_schedule_slot (
    name       text not null,
    slot       integer not null,
    until      integer not null,
    count      integer not null,
    status     text not null check (status in ('open', 'success', 'failure', 'skipped')),
    reason     text,
    attempt    integer not null,
    owner      text,
    taken_at   integer not null,
    started_at real,
    ended_at   real,
    note       text,
    primary key (name, slot)
) without rowid;
create index holdfast_schedule_slot_open on holdfast_schedule_slot (name) where status = 'open';

create view holdfast_schedule_now as
select cast({now} * 1000000 as integer) as now;

insert into holdfast_schema_version (version, name) values (9, 'schedule');
