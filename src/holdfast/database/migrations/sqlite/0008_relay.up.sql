-- Relays publish the log. The cursor of each is stored here, and only the process that runs the relay can move it.
create table holdfast_relay (
    name     text primary key,
    place    integer not null,
    told     integer not null,
    fence    integer not null,
    moved_at real not null,
    problem  text,
    since    real,
    tries    text not null default '{}',
    taken    text,
    check ((problem is null) = (since is null))
);

create table holdfast_parked (
    relay     text not null references holdfast_relay on delete cascade,
    id        text not null,
    idem_key  text not null,
    event     text not null,
    problem   text not null,
    tries     integer not null,
    parked_at real not null,
    again     integer not null default 0,
    primary key (relay, id)
);
create index holdfast_parked_key on holdfast_parked (idem_key);
create index holdfast_outbox_key on holdfast_outbox (idem_key);

insert into holdfast_schema_version (version, name) values (8, 'relay');
