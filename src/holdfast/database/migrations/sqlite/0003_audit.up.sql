-- What operators do to others' work: who, why, what, and the outcome.
create table holdfast_audit (
    id       integer primary key,
    at       real not null,
    actor    text not null,
    action   text not null,
    subject  text not null,
    reason   text not null,
    detail   text,
    outcome  text,
    ended_at real
);

insert into holdfast_schema_version (version, name) values (3, 'audit');
